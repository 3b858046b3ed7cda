// The device as a Python module. tests/virtual_device/torch_cuda.py puts it in the place of torch.cuda's functions.
#include "collectives.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace virtual_device {

// Finish what is queued, forget what was seen, and begin again under another schedule.
void begin(uint64_t seed, int how, double how_eager) {
  for (int device = 0; device < devices; device++) wait_for_device(device);
  Lock lock;
  schedule = (Schedule)how;
  eagerness = how_eager;
  chance.seed(seed);
  for (auto& stream : streams) stream->weight = random_weight();
  settle_frees();
  races.clear();
  errors.clear();
  host_waits.clear();
  kernels = 0;
  for (auto& [address, block] : blocks) block->accesses.clear();
}

void meet(int64_t group, int64_t number, int world, int rank, int kind, std::vector<at::Tensor> sent,
          std::vector<at::Tensor> received, int64_t root) {
  Lock lock;
  auto& meeting = meetings[{group, number}];
  if (!meeting) meeting = std::make_shared<Meeting>(Meeting{world});
  Part part{(Kind)kind, aliases(sent), aliases(received), root};
  for (auto& [other, theirs] : meeting->parts)
    TORCH_CHECK(theirs.header() == part.header(), "ranks disagree about collective ", number, " of their group: rank ",
                rank, " asks for an ", part.describe(part.header()), ", rank ", other, " for an ",
                theirs.describe(theirs.header()));
  int stream = stream_of(current_device);
  kernels++;
  uint64_t time = launch(stream);
  for (auto& tensor : sent) touch(tensor, false, stream, time, name_of(part.kind));
  for (auto& tensor : received) touch(tensor, true, stream, time, name_of(part.kind));
  meeting->parts[rank] = std::move(part);
  meeting->streams[rank] = stream;
  auto own = meeting;
  if ((int)own->parts.size() == world) meetings.erase({group, number});
  Item item{name_of((Kind)kind)};
  if (schedule != EMPTY) item.job = std::make_shared<Arrival>(own, rank);
  push(stream, std::move(item));
}

}  // namespace virtual_device

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace virtual_device;
  m.def("install", [] {
    install();
    observe_the_host();
  });
  m.def("begin", &begin);
  m.def("races", [] {
    Lock lock;
    return std::vector<std::string>(races.begin(), races.end());
  });
  m.def("host_waits", [] {
    Lock lock;
    std::vector<std::pair<std::string, std::string>> all;
    for (auto& wait : host_waits) all.emplace_back(wait.what, wait.place);
    return all;
  });
  m.def("forget_host_waits", [] {
    Lock lock;
    host_waits.clear();
  });
  m.def("errors", [] {
    Lock lock;
    return errors;
  });
  m.def("kernels", [] {
    Lock lock;
    return kernels;
  });
  m.def("pending", [] {
    Lock lock;
    size_t count = 0;
    for (auto& stream : streams) count += stream->items.size();
    return count;
  });
  m.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  m.def("get_sync_debug_mode", [] { return sync_debug_mode; });
  m.def("device_count", [] { return devices; });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) {
    TORCH_CHECK(0 <= device && device < devices, "invalid device ordinal ", device);
    current_device = device;
  });
  m.def("current_stream", [](int device) { return (int64_t)guard.getStream({at::kCUDA, (DeviceIndex)device}).id(); });
  m.def("set_stream", [](int device, int64_t id) {
    guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, {at::kCUDA, (DeviceIndex)device}, id));
  });
  m.def("synchronize", [](int device) { guard.synchronizeDevice(device); });
  m.def("sleep", [](double seconds) {
    Item item{"sleep"};
    if (schedule != EMPTY) item.job = std::make_shared<Sleep>(seconds);
    push(stream_of(current_device), std::move(item));
  });
  m.def("get_rng_state", [](int device) { return generator_of(device).get_state(); });
  m.def("set_rng_state", [](int device, const at::Tensor& state) { generator_of(device).set_state(state); });
  m.def("manual_seed", [](int device, uint64_t seed) { generator_of(device).set_current_seed(seed); });
  m.def("memory", [](int device) {  // bytes that are not freed, and the most since `reset_peak_memory`
    Lock lock;
    return std::make_pair(held[device].now, held[device].most);
  });
  m.def("reset_peak_memory", [](int device) {
    Lock lock;
    held[device].most = held[device].now;
  });
  m.def("resize_storage",
        [](const at::Storage& storage, size_t bytes) { resize_storage(storage.unsafeGetStorageImpl(), bytes); });
  m.def("meet", &meet);
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "Group")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, std::string>());
}
