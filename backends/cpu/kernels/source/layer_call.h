// Calls of a compiled layer by the compiled pass that it is part of.
#include <initializer_list>
#include <vector>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// An input of a layer: a tensor or, where `dim` is not negative, the size of that dimension of it.
struct LayerInput {
    AtenTensorHandle tensor;
    int64_t dim;
};

// The output of a layer. A row of the table [L, W] of whole numbers holds the address of the code,
// the number of constants, and their addresses.
inline AtenTensorHandle call_layer(
    AtenTensorHandle table, int64_t row, std::initializer_list<LayerInput> inputs) {
    void* start;
    int64_t width;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(table, &start));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(table, 1, &width));
    const int64_t* numbers = static_cast<const int64_t*>(start) + row * width;
    std::vector<AtenTensorHandle> given;  // which the layer's code releases
    given.reserve(inputs.size() + numbers[1]);
    AtenTensorHandle handle;
    for (const LayerInput& input : inputs) {
        if (input.dim < 0) {
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(input.tensor, &handle));
        } else {
            int64_t size;
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(input.tensor, input.dim, &size));
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_scalar_to_tensor_int64(size, &handle));
        }
        given.push_back(handle);
    }
    for (int64_t place = 0; place < numbers[1]; place++) {
        auto constant = reinterpret_cast<AtenTensorHandle>(numbers[2 + place]);
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(constant, &handle));
        given.push_back(handle);
    }
    using Code = void (*)(AtenTensorHandle*, AtenTensorHandle*);
    reinterpret_cast<Code>(numbers[0])(given.data(), &handle);
    return handle;
}
