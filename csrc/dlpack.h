// The part of the DLPack 1.x C ABI that fastguard reads, declared here so that a build needs neither torch nor
// DLPack headers. Layout: https://dmlc.github.io/dlpack (DLTensor, DLPackExchangeAPI).
#pragma once
#include <cstdint>

namespace fastguard::dlpack {

constexpr int32_t kCPU = 1;
enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct ExchangeAPI {
  Version version;
  ExchangeAPI* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  // Borrowed view: shape and strides point into the tensor, nothing is allocated; non-zero with a Python error set.
  int (*tensor_from_object)(void* object, Tensor* out);
  void* current_stream;
};

}  // namespace fastguard::dlpack
