// Lets torch's CPU build run programs on fake CUDA tensors, as its CUDA build does by itself: autograd asks for
// an accelerator with streams, and scaled_dot_product_attention for a kernel. Nothing is computed.
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

// The registry looks it up by this name, before torch's first question.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

// What sdp_utils.cpp of the CUDA build chooses: flash in 16 bits; in fp32 the memory-efficient kernel, which
// has no grouped queries; else the plain products.
int64_t choose_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor&,
                      const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  auto kernel = at::SDPBackend::math;
  if (query.scalar_type() != at::kFloat) {
    kernel = at::SDPBackend::flash_attention;
  } else if (query.sym_size(1) == key.sym_size(1)) {
    kernel = at::SDPBackend::efficient_attention;
  }
  return static_cast<int64_t>(kernel);
}

Guard guard;

struct Installer {
  Installer() {
    c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_kernel);
  }
} installer;

}  // namespace

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
