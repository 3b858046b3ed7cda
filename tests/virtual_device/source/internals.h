// Everything of PyTorch's insides that the device leans on. Another version may have it otherwise: constraints.txt
// names the one that this was written for.
//
// 1. c10::impl::device_guard_impl_registry: the slot of kCUDA is empty in a CPU build, and takes a guard at any time.
// 2. at::detail::getCUDAHooks(): an object that says "no CUDA", made when torch is imported; ours is built in its
// place.
// 3. c10::SetAllocator(kCUDA).
// 4. c10d::TimerRegistry: PyTorch's DDP asks for the timer of its parameters' device.
// 5. The dispatch key CUDA has neither kernels nor a fallback in a CPU build (operators.h), and
// CompositeExplicitAutograd
//    kernels stand before a fallback.
#pragma once
#include "memory.h"
#include "waits.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace virtual_device {

using c10::DeviceIndex;

// Random numbers of a device: its own generator says where each kernel's numbers begin when the kernel is queued.
inline at::Generator& generator_of(int device) {
  static auto& generators = *new std::vector<at::Generator>;
  Lock lock;
  while ((int)generators.size() <= device)
    generators.push_back(at::detail::createCPUGenerator(c10::detail::getNonDeterministicRandom()));
  return generators[device];
}

struct Event {
  TicketPtr ticket;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device device) { return device.index() >= 0 ? device.index() : current_device; }
  static c10::Stream wrap(int stream) {
    ensure_default_streams();
    return c10::Stream(c10::Stream::UNSAFE, {at::kCUDA, (DeviceIndex)streams[stream]->device},
                       stream < devices ? 0 : stream);
  }
  static int unwrap(const c10::Stream& stream) {
    ensure_default_streams();
    return stream.id() == 0 ? index(stream.device()) : (int)stream.id();
  }
  c10::DeviceType type() const override { return at::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {at::kCUDA, (DeviceIndex)current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return wrap(stream_of(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return wrap(index(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return wrap(new_stream(index(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return wrap(new_stream(index(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int number = unwrap(stream), device = streams[number]->device;
    auto before = wrap(stream_of(device));
    current_streams[device] = number;
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    ((Event*)*event)->ticket = record_on(unwrap(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_on(unwrap(stream), ((Event*)event)->ticket);
  }
  bool queryEvent(void* event) const override { return !event || look(((Event*)event)->ticket); }
  bool queryStream(const c10::Stream& stream) const override { return look(record_on(unwrap(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait("stream.synchronize");
    wait_for_stream(unwrap(stream));
  }
  void synchronizeEvent(void* event) const override {
    note_wait("event.synchronize");
    if (event) wait_until(((Event*)event)->ticket);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    note_wait("synchronize");
    wait_for_device(device);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return 1e3 * (((Event*)to)->ticket->at - ((Event*)from)->ticket->at);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock;
    if (Block* block = block_of(data.get())) block->users.insert(unwrap(stream));
  }
};
inline Guard& guard = *new Guard;

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return virtual_device::current_device; }
  DeviceIndex getCurrentDevice() const override { return virtual_device::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { virtual_device::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = virtual_device::current_device;
    if (device >= 0) virtual_device::current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return generator_of(device < 0 ? virtual_device::current_device : device);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    Lock lock;
    Block* block = block_of(address);
    return at::Device(at::kCUDA, block && block->device != HOST ? block->device : 0);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  std::string showConfig() const override { return "a virtual device"; }
  void deviceSynchronize(DeviceIndex device) const override { guard.synchronizeDevice(device); }
};

// The host's clock: how long the device took is not what this device can tell.
struct HostTimer final : c10d::Timer {
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event from, Event to) override {
    auto begun = getTimestamp(from), ended = getTimestamp(to);
    if (!begun || !ended || *ended < *begun) return std::nullopt;
    return *ended - *begun;
  }
};

inline void install() {
  TORCH_CHECK(!at::detail::getCUDAHooks().hasCUDA(),
              "the virtual device is for a PyTorch without CUDA, and this one has it");
  ensure_default_streams();
  c10::impl::device_guard_impl_registry[(size_t)at::kCUDA].store(&guard);
  c10::SetAllocator(at::kCUDA, &device_allocator, 1);
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  c10d::TimerRegistry()->Register(
      at::kCUDA, [](c10::Device device) { return std::unique_ptr<c10d::Timer>(new HostTimer(device)); });
}

}  // namespace virtual_device
