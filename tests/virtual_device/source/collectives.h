// Collectives on a stream of their own, among processes or among the devices of one process.
//
// Ranks exchange bytes, then compute in rank order, so that a sum has the bits of the lockstep's. Ranks that disagree
// on what they exchange are told; real NCCL would hang, or mix data.
#pragma once
#include "operators.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace virtual_device {

enum Kind { ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, BROADCAST, BARRIER };
inline const char* name_of(Kind kind) {
  constexpr const char* names[] = {"all-reduce", "all-gather", "all-to-all", "reduce-scatter", "broadcast", "barrier"};
  return names[kind];
}

// One rank's part in a collective, on aliases of its tensors. `sent` is what it sends, one row for each rank that gets
// another one (all-to-all, reduce-scatter), or the same to all; `received` takes what comes out.
struct Part {
  Kind kind;
  std::vector<Tensor> sent, received;
  int64_t root = 0;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;

  std::vector<int64_t> header() const {
    int64_t bytes = 0, dtype = sent.empty() ? -1 : (int64_t)sent[0].scalar_type();
    for (auto& tensor : sent) bytes += tensor.numel() * tensor.element_size();
    bool is_typed = kind == ALL_REDUCE || kind == REDUCE_SCATTER;
    return {kind, kind == BROADCAST || kind == ALL_TO_ALL ? (int64_t)sent.size() : bytes, is_typed ? dtype : 0,
            is_typed ? (int64_t)op : 0, root};
  }
  std::string describe(const std::vector<int64_t>& header) const {
    return std::string(name_of((Kind)header[0])) + " of " + std::to_string(header[1]) +
           (header[0] == BROADCAST || header[0] == ALL_TO_ALL ? " tensors" : " bytes") +
           (header[2] > 0 ? std::string(" of ") + c10::toString((c10::ScalarType)header[2]) : "");
  }
  bool sends_rows() const { return kind == ALL_TO_ALL || kind == REDUCE_SCATTER; }
  void reduce(const std::vector<Tensor>& rows, Tensor& into) const {
    Tensor total = rows[0].clone();
    for (size_t r = 1; r < rows.size(); r++) {
      if (op == c10d::ReduceOp::MAX)
        total = at::maximum(total, rows[r]);
      else if (op == c10d::ReduceOp::MIN)
        total = at::minimum(total, rows[r]);
      else if (op == c10d::ReduceOp::PRODUCT)
        total.mul_(rows[r]);
      else
        total.add_(rows[r]);
    }
    if (op == c10d::ReduceOp::AVG) total.div_((double)rows.size());
    into.copy_(total.view_as(into));
  }
};

inline std::vector<Tensor> aliases(const std::vector<Tensor>& tensors) {
  Storages known;
  std::vector<Tensor> all;
  for (auto& tensor : tensors) all.push_back(alias_of(tensor, known));
  return all;
}

// ---- among devices of this process ----
struct Meeting {
  int world;
  std::map<int, Part> parts;
  std::map<int, int> streams;  // by rank, of those that are queued
  std::set<int> come;
  bool is_done = false;

  void run() {
    auto each = [&](auto visit) {
      for (int r = 0; r < world; r++) visit(r);
    };
    auto column = [&](int place, size_t n) {
      std::vector<Tensor> rows;
      each([&](int s) { rows.push_back(parts[s].sent[place < 0 ? n : place]); });
      return rows;
    };
    std::map<int, std::vector<Tensor>> results;
    each([&](int r) {
      Part& own = parts[r];
      auto& out = results[r];
      if (own.kind == ALL_REDUCE)
        for (size_t n = 0; n < own.sent.size(); n++)
          own.reduce(column(-1, n), out.emplace_back(at::empty_like(own.sent[n])));
      else if (own.kind == REDUCE_SCATTER)
        own.reduce(column(r, 0), out.emplace_back(at::empty_like(own.received[0])));
      else if (own.kind == ALL_GATHER)
        each([&](int s) { out.push_back(parts[s].sent[0].clone()); });
      else if (own.kind == ALL_TO_ALL)
        each([&](int s) { out.push_back(parts[s].sent[r].clone()); });
      else if (own.kind == BROADCAST)
        for (auto& tensor : parts[own.root].sent) out.push_back(tensor.clone());
    });
    each([&](int r) {
      for (size_t n = 0; n < results[r].size(); n++)
        parts[r].received[n].copy_(results[r][n].view_as(parts[r].received[n]));
    });
    is_done = true;
  }
};
struct Arrival : Job {
  std::shared_ptr<Meeting> meeting;
  int rank;
  Arrival(std::shared_ptr<Meeting> meeting, int rank) : meeting(std::move(meeting)), rank(rank) {}
  void begin() override {
    meeting->come.insert(rank);
    if ((int)meeting->come.size() == meeting->world) meeting->run();
  }
  bool is_finished() override { return meeting->is_done; }
  std::vector<int> needs() override {
    std::vector<int> missing;
    for (auto& [other, stream] : meeting->streams)
      if (!meeting->come.count(other)) missing.push_back(stream);
    return missing;
  }
};
inline auto& meetings = *new std::map<std::pair<int64_t, int64_t>, std::shared_ptr<Meeting>>;  // by group and number

// ---- among processes ----
// The connection belongs to the group: to drop the group is to close it, also for what is still queued.
struct Channel {
  c10::intrusive_ptr<c10d::Backend> gloo;
  int rank, world;
  int64_t number = 0;
};
struct Exchange : Job {
  std::shared_ptr<Channel> channel;
  Part part;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<Tensor> mine, theirs;  // of the header, then of the data
  bool has_agreed = false, is_done = false;

  Exchange(std::shared_ptr<Channel> channel, Part part) : channel(std::move(channel)), part(std::move(part)) {
    remote_jobs++;
  }
  ~Exchange() override { remote_jobs--; }
  bool is_elsewhere() const override { return true; }

  void begin() override {
    TORCH_CHECK(channel->gloo, "the process group was dropped");
    auto own = part.header();
    own.push_back(channel->number++);
    gather(at::tensor(own, at::kLong));
  }
  bool is_finished() override {
    try {
      while (!is_done) {
        for (auto& work : works)
          if (!work->isCompleted()) return false;
        for (auto& work : works)
          if (!work->isSuccess()) std::rethrow_exception(work->exception());
        run_below_python([&] { has_agreed ? finish() : agree(); });
      }
    } catch (const std::exception& error) {
      errors.push_back(std::string(name_of(part.kind)) +
                       " among processes: " + std::string(error.what()).substr(0, 400));
      is_done = true;
    }
    return true;
  }

 private:
  void gather(const Tensor& sent) {
    mine = {sent};
    theirs.clear();
    for (int r = 0; r < channel->world; r++) theirs.push_back(at::empty_like(sent));
    std::vector<std::vector<Tensor>> into{theirs};
    works = {channel->gloo->allgather(into, mine)};
  }
  void agree() {
    for (int r = 0; r < channel->world; r++)
      if (!theirs[r].equal(mine[0])) {
        auto read = [](const Tensor& header) {
          return std::vector<int64_t>(header.const_data_ptr<int64_t>(),
                                      header.const_data_ptr<int64_t>() + header.numel());
        };
        TORCH_CHECK(false, "ranks disagree about collective ", read(mine[0]).back(), " of their group: rank ",
                    channel->rank, " asks for an ", part.describe(read(mine[0])), ", rank ", r, " for an ",
                    part.describe(read(theirs[r])));
      }
    has_agreed = true;
    works.clear();
    if (part.kind == BARRIER) return;
    if (part.kind == ALL_TO_ALL) {
      std::vector<int64_t> in, out;
      for (auto& row : part.sent) in.push_back(row.numel() * row.element_size());
      for (auto& row : part.received) out.push_back(row.numel() * row.element_size());
      mine = {bytes(part.sent)};
      theirs = {at::empty({std::accumulate(out.begin(), out.end(), (int64_t)0)}, at::kByte)};
      works = {channel->gloo->alltoall_base(theirs[0], mine[0], out, in)};
    } else if (part.kind == BROADCAST) {
      mine = {bytes(part.sent)};
      c10d::BroadcastOptions options;
      options.rootRank = part.root;
      works = {channel->gloo->broadcast(mine, options)};
    } else {
      gather(bytes(part.sent));
    }
  }
  void finish() {
    if (part.kind == ALL_REDUCE || part.kind == REDUCE_SCATTER) {
      std::vector<std::vector<Tensor>> rows;
      for (auto& own : theirs) rows.push_back(split(own, part.sent));
      for (size_t n = 0; n < part.received.size(); n++) {
        size_t place = part.kind == REDUCE_SCATTER ? channel->rank : n;
        std::vector<Tensor> column;
        for (auto& row : rows) column.push_back(row[place]);
        part.reduce(column, part.received[n]);
      }
    } else if (part.kind == ALL_GATHER) {
      for (int r = 0; r < channel->world; r++) copy(part.received[r], theirs[r]);
    } else if (part.kind == ALL_TO_ALL) {
      auto rows = split(theirs[0], part.received);
      for (size_t n = 0; n < rows.size(); n++) part.received[n].copy_(rows[n]);
    } else if (part.kind == BROADCAST) {
      auto tensors = split(mine[0], part.received);
      for (size_t n = 0; n < tensors.size(); n++) part.received[n].copy_(tensors[n]);
    }
    is_done = true;
  }
  static Tensor bytes(const std::vector<Tensor>& tensors) {
    std::vector<Tensor> flat{at::empty({0}, at::kByte)};
    for (auto& tensor : tensors)
      if (tensor.numel()) flat.push_back(tensor.contiguous().view({-1}).view(at::kByte));
    return at::cat(flat);
  }
  static void copy(Tensor& into, const Tensor& bytes) {
    if (into.numel()) into.copy_(bytes.view(into.scalar_type()).view(into.sizes()));
  }
  static std::vector<Tensor> split(const Tensor& bytes, const std::vector<Tensor>& like) {
    std::vector<Tensor> parts;
    int64_t at = 0;
    for (auto& tensor : like) {
      int64_t size = tensor.numel() * tensor.element_size();
      parts.push_back(at::empty(tensor.sizes(), tensor.options()));
      copy(parts.back(), bytes.slice(0, at, at + size).clone());
      at += size;
    }
    return parts;
  }
};

// ---- what the caller holds ----
struct Work final : c10d::Work {
  TicketPtr done;
  std::vector<Tensor> kept, results;  // kept until the caller's stream waits, as NCCL's since PyTorch 2.7
  int device;
  bool host_waits;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  Work(TicketPtr done, std::vector<Tensor> kept, std::vector<Tensor> results, int device, int stream, bool host_waits)
      : c10d::Work(-1),
        done(std::move(done)),
        kept(std::move(kept)),
        results(results),
        device(device),
        host_waits(host_waits) {
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                      std::vector<c10::Device>{{at::kCUDA, (DeviceIndex)device}});
    c10::StreamGuard on(Guard::wrap(stream));
    future->markCompleted(at::IValue(std::move(results)));
  }
  bool isCompleted() override { return look(done); }
  bool isSuccess() const override { return done->done; }
  std::vector<Tensor> result() override { return results; }
  void synchronize() override {
    wait_on(stream_of(device), done);
    kept.clear();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (host_waits) {
      bool is_limited = timeout != ::kNoTimeout && timeout.count() > 0;
      TORCH_CHECK(wait_until(done, is_limited ? Seconds(timeout).count() : INFINITY), "Timed out waiting ",
                  timeout.count(), "ms for a collective");
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

// A rank's group over NCCL, or over Gloo, whose `wait` blocks the host.
class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : c10d::Backend(gloo->getRank(), gloo->getSize()),
        name_(std::move(name)),
        channel_(std::make_shared<Channel>(Channel{gloo, gloo->getRank(), gloo->getSize()})) {
    keep_pace();
  }
  ~Group() override {
    Lock lock;
    channel_->gloo.reset();
  }
  const std::string getBackendName() const override { return name_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds) override {}

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start({ALL_REDUCE, {}, {}, 0, options.reduceOp}, tensors, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start({BROADCAST, {}, {}, options.rootRank}, tensors, tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return start({ALL_GATHER}, inputs, outputs.at(0));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(output.numel() == input.numel() * getSize(), "all-gather: the output holds ", output.numel(),
                " elements, not ", getSize(), " times ", input.numel());
    return start({ALL_GATHER}, {input}, rows(output));
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return start({REDUCE_SCATTER, {}, {}, 0, options.reduceOp}, inputs.at(0), outputs);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.numel() == output.numel() * getSize(), "reduce-scatter: the input holds ", input.numel(),
                " elements, not ", getSize(), " times ", output.numel());
    return start({REDUCE_SCATTER, {}, {}, 0, options.reduceOp}, rows(input), {output});
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out, std::vector<int64_t>& in,
                        const c10d::AllToAllOptions&) override {
    return start({ALL_TO_ALL}, in.empty() ? rows(input) : input.split_with_sizes(in),
                 out.empty() ? rows(output) : output.split_with_sizes(out));
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return start({ALL_TO_ALL}, inputs, outputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto work = start({BARRIER}, {}, {});
    wait_until(static_cast<Work*>(work.get())->done);  // NCCL's blocks the host too
    return work;
  }

 private:
  std::string name_;
  std::shared_ptr<Channel> channel_;
  std::map<int, int> streams_;  // by device
  uint64_t sequence_ = 0;

  Tensors rows(const Tensor& tensor) const { return tensor.view({getSize(), -1}).unbind(0); }
  WorkPtr start(Part part, const Tensors& sent, const Tensors& received) {
    int device = current_device;
    for (auto* tensors : {&sent, &received})
      for (auto& tensor : *tensors) {
        TORCH_CHECK(tensor.is_cuda(), name_, ": no backend for a tensor on ", tensor.device());
        device = tensor.device().index();
      }
    part.sent = aliases(sent);
    part.received = aliases(received);
    Lock lock;
    sequence_++;
    if (!streams_.count(device)) streams_[device] = new_stream(device);
    int stream = streams_[device];
    wait_on(stream, record_on(stream_of(device)));
    kernels++;
    uint64_t time = launch(stream);
    for (auto& tensor : sent) touch(tensor, false, stream, time, name_of(part.kind));
    for (auto& tensor : received) touch(tensor, true, stream, time, name_of(part.kind));
    Item item{name_of(part.kind)};
    if (schedule != EMPTY) item.job = std::make_shared<Exchange>(channel_, std::move(part));
    push(stream, std::move(item));
    Tensors kept(sent);
    kept.insert(kept.end(), received.begin(), received.end());
    return c10::make_intrusive<Work>(record_on(stream), std::move(kept), received, device, stream, name_ == "gloo");
  }
};

}  // namespace virtual_device
