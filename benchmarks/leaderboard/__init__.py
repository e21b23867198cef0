"""Train several heads for the same time on the same data, then race them."""
