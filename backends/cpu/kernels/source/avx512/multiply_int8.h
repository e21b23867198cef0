#include "vnni.h"
