// Memory: the device's and the pinned, who accesses it, and in which order.
#pragma once
#include "queue.h"
#include <ATen/ATen.h>
#include <set>

namespace virtual_device {

struct Access {
  size_t begin, end;  // bytes of the block
  bool writes;
  int stream;     // or HOST
  uint64_t time;  // of that stream
  std::string name;
};
struct Block {
  char* base;
  size_t size;
  int device;             // HOST: pinned memory
  int stream;             // on which it was allocated, and to whose pool it returns
  std::set<int> users{};  // streams named by record_stream
  std::vector<Access> accesses{};
};

inline auto& blocks = *new std::map<uintptr_t, std::unique_ptr<Block>>;
inline auto& pools = *new std::map<std::pair<int, size_t>, std::vector<Block*>>;  // freed blocks, by stream and size
struct Deferred {
  Block* block;
  std::vector<TicketPtr> tickets;
};
inline auto& deferred = *new std::vector<Deferred>;
struct Held {
  size_t now = 0, most = 0;  // bytes that are not freed
};
inline auto& held = *new std::map<int, Held>;  // by device
inline auto& races = *new std::set<std::string>;

inline Block* block_of(const void* address) {
  auto after = blocks.upper_bound((uintptr_t)address);
  if (after == blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second.get();
  return (const char*)address < block->base + block->size ? block : nullptr;
}

inline std::string place(int stream) { return stream == HOST ? "by the host" : "on stream " + std::to_string(stream); }
inline void note(Block& block, const Access& now, const Clock& known) {
  auto& earlier = block.accesses;
  for (size_t n = 0; n < earlier.size();) {
    const Access& before = earlier[n];
    bool overlaps = before.begin < now.end && now.begin < before.end;
    auto seen = known.find(before.stream);
    bool is_ordered = before.stream == now.stream || (seen != known.end() && seen->second >= before.time);
    if (overlaps && !is_ordered && (now.writes || before.writes))
      races.insert(now.name + (now.writes ? " writes " : " reads ") + place(now.stream) + " what " + before.name +
                   (before.writes ? " writes " : " reads ") + place(before.stream) + ", in no order");
    bool covers = now.begin <= before.begin && before.end <= now.end;
    if (covers && is_ordered && (now.writes || (!before.writes && before.stream == now.stream)))
      earlier.erase(earlier.begin() + n);
    else
      n++;
  }
  earlier.push_back(now);
}
// A tensor's bytes, as a box around them: strided views that interleave count as overlapping.
inline void touch(const at::Tensor& tensor, bool writes, int stream, uint64_t time, const std::string& name) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  char* data = (char*)tensor.storage().data();
  Block* block = block_of(data);
  if (!block) return;
  size_t first = tensor.storage_offset(), last = first, width = tensor.element_size();
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  size_t offset = data - block->base;
  note(*block, {offset + first * width, offset + (last + 1) * width, writes, stream, time, name},
       stream == HOST ? host : streams[stream]->clock);
}
inline void touch_by_host(const at::Tensor& tensor, bool writes, const std::string& name) {
  Lock lock;
  touch(tensor, writes, HOST, ++host[HOST], name);
}

// ---- the caching allocator ----
inline void settle_frees() {
  for (size_t n = 0; n < deferred.size();) {
    auto& [block, tickets] = deferred[n];
    bool all = true;
    for (auto& ticket : tickets) all &= ticket->done;
    if (!all) {
      n++;
      continue;
    }
    for (auto& ticket : tickets) join(host, ticket->clock);  // the allocator has seen the events
    pools[{block->stream, block->size}].push_back(block);
    deferred.erase(deferred.begin() + n);
  }
}
inline void release(void* address) {
  Lock lock;
  auto found = blocks.find((uintptr_t)address);
  if (found == blocks.end()) return;
  Block* block = found->second.get();
  held[block->device].now -= block->size;
  std::vector<TicketPtr> tickets;
  for (int user : block->users)
    if (user != block->stream) tickets.push_back(record_on(user));
  block->users.clear();
  if (!tickets.empty()) return deferred.push_back({block, std::move(tickets)});
  // whoever allocates next on this stream may write from here on
  uint64_t time = launch(block->stream);
  note(*block, {0, block->size, true, block->stream, time, "the next owner of freed memory"},
       streams[block->stream]->clock);
  push(block->stream, Item{"overwrite freed memory", [block] { std::memset(block->base, 0xff, block->size); }});
  pools[{block->stream, block->size}].push_back(block);
}
inline void* obtain(size_t bytes) {
  Lock lock;
  size_t size = std::max<size_t>(512, (bytes + 511) / 512 * 512);
  int stream = stream_of(current_device);
  Held& own = held[current_device];
  own.now += size;
  own.most = std::max(own.most, own.now);
  settle_frees();
  auto& pool = pools[{stream, size}];
  if (!pool.empty()) {
    size_t n = chance() % pool.size();
    Block* block = pool[n];
    pool.erase(pool.begin() + n);
    if (schedule == EMPTY) std::memset(block->base, 0, size);
    return block->base;
  }
  char* base = (char*)std::aligned_alloc(512, size);
  TORCH_CHECK(base, "virtual device: out of memory (", size, " bytes)");
  std::memset(base, schedule == EMPTY ? 0 : 0xff, size);
  blocks[(uintptr_t)base] = std::make_unique<Block>(Block{base, size, current_device, stream});
  return base;
}
struct DeviceAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* base = obtain(bytes);
    return {base, base, &release, at::Device(at::kCUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline DeviceAllocator& device_allocator = *new DeviceAllocator;

// ---- pinned memory ----
// It begins as NaN, as whoever had it before may have left it. Items that are queued keep it alive, as CUDA's allocator
// does.
inline void unpin(void* address) {
  Lock lock;
  blocks.erase((uintptr_t)address);
  std::free(address);
}
inline bool has_pinned = false;
struct PinnedAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    Lock lock;
    size_t size = std::max<size_t>(64, (bytes + 63) / 64 * 64);
    char* base = (char*)std::aligned_alloc(64, size);
    TORCH_CHECK(base, "virtual device: out of pinned memory (", size, " bytes)");
    std::memset(base, 0xff, size);
    blocks[(uintptr_t)base] = std::make_unique<Block>(Block{base, size, HOST, HOST});
    has_pinned = true;
    return {base, base, &unpin, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedAllocator& pinned_allocator = *new PinnedAllocator;
inline bool is_pinned(const void* address) {
  Lock lock;
  Block* block = block_of(address);
  return block && block->device == HOST;
}

}  // namespace virtual_device
