// Streams, events and the adversary: what is queued, and when it runs.
//
// A stream is a queue of items. An item runs when it stands first and what it waits for is done. Which stream goes on
// is the schedule's choice: as soon as possible (eager), only what the host waits for (late), or any (random, seeded).
#pragma once
#include <torch/csrc/utils/pybind.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace virtual_device {

using Seconds = std::chrono::duration<double>;
inline double now() { return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What is known to be done before: for each stream (and HOST, for the host's own accesses), how many of its launches.
using Clock = std::map<int, uint64_t>;
constexpr int HOST = -1;
inline void join(Clock& into, const Clock& from) {
  for (auto& [stream, time] : from) {
    auto& mine = into[stream];
    mine = std::max(mine, time);
  }
}

// An event: a position in a stream's queue.
struct Ticket {
  bool done = false;
  double at = 0;  // when it was reached, in seconds
  int stream = 0;
  Clock clock;
};
using TicketPtr = std::shared_ptr<Ticket>;

// What takes its own time once it has begun: a collective, a stream kept busy.
struct Job {
  virtual ~Job() = default;
  virtual void begin() = 0;
  virtual bool is_finished() = 0;
  virtual std::vector<int> needs() { return {}; }      // streams of this process that must go on before it can end
  virtual bool is_elsewhere() const { return false; }  // it waits for wall time or for other processes
};

struct Item {
  std::string name;
  std::function<void()> run;
  TicketPtr wait, record;
  std::shared_ptr<Job> job;
  bool begun = false;
};

struct Stream {
  int device, id;
  std::deque<Item> items;
  Clock clock;
  double weight = 1;  // how fast it is, beside others
};

enum Schedule { EAGER, LATE, RANDOM, EMPTY };  // EMPTY: kernels are counted and not run

// The whole device. One lock: kernels run one after another, on whichever thread lets time pass.
inline std::recursive_mutex mutex;
// Whoever has the interpreter's lock gives it up before waiting for this one: kernels may need that lock (Gloo takes
// the caller's Python stack).
class Lock {
 public:
  Lock() {
    if (mutex.try_lock()) return;
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    mutex.lock();
  }
  ~Lock() { mutex.unlock(); }
  Lock(const Lock&) = delete;
};

inline int devices = 2;
inline Schedule schedule = EAGER;
inline double eagerness = 0.3;  // random: how probable it is that something runs whenever something is queued
inline std::mt19937_64 chance(0);
inline uint64_t kernels = 0;
inline bool is_running = false;  // a kernel is: what it queues or frees itself is no new work
inline double last_call = 0;     // of the host
inline std::vector<std::string>& errors = *new std::vector<std::string>;
inline Clock& host = *new Clock;  // what the host has waited for
inline std::vector<std::unique_ptr<Stream>>& streams = *new std::vector<std::unique_ptr<Stream>>;
// Stream d is device d's default stream. Nothing here is ever destroyed: threads may outlive the interpreter.

inline thread_local int current_device = 0;
inline thread_local std::map<int, int> current_streams;  // by device

inline void ensure_default_streams() {
  Lock lock;
  while ((int)streams.size() < devices) {
    int number = (int)streams.size();
    streams.push_back(std::make_unique<Stream>(Stream{number, number, {}, {}, 1}));
  }
}
inline double random_weight() { return std::exp(std::normal_distribution<double>(0, 2)(chance)); }
inline double uniform() { return std::uniform_real_distribution<double>(0, 1)(chance); }
inline int new_stream(int device) {
  Lock lock;
  ensure_default_streams();
  int number = (int)streams.size();
  streams.push_back(std::make_unique<Stream>(Stream{device, number, {}, {}, random_weight()}));
  return number;
}
inline int stream_of(int device) {
  ensure_default_streams();
  auto found = current_streams.find(device);
  return found == current_streams.end() ? device : found->second;
}

// ---- what runs ----
void run_below_python(const std::function<void()>& kernel);  // operators.h: below autograd, autocast and Python's modes

// A job that looks whether it is finished may compute, and free memory: what that queues must not run here, or it could
// take the job itself from its queue.
inline bool is_finished(Job& job) {
  bool before = std::exchange(is_running, true);
  bool finished = job.is_finished();
  is_running = before;
  return finished;
}
inline bool can_step(const Stream& stream) {
  if (stream.items.empty()) return false;
  const Item& first = stream.items.front();
  if (first.wait) return first.wait->done;
  return !first.job || !first.begun || is_finished(*first.job);
}
inline void step(Stream& stream) {  // of one that can
  Item& first = stream.items.front();
  is_running = true;
  try {
    if (first.job && !first.begun) {
      first.begun = true;
      run_below_python([&] { first.job->begin(); });
      is_running = false;
      return;
    }
    if (first.run) run_below_python(first.run);
  } catch (const std::exception& error) {
    errors.push_back(first.name + " on stream " + std::to_string(stream.id) + ": " +
                     std::string(error.what()).substr(0, 400));
    if (first.job && !stream.items.empty()) first.job = nullptr;  // it will not end by itself
  }
  Item done = std::move(stream.items.front());
  stream.items.pop_front();
  is_running = false;
  if (done.record) {
    done.record->done = true;
    done.record->at = now();
  }
}
inline bool step_any() {  // return whether anything could run
  if (uniform() < 0.02)
    for (auto& stream : streams) stream->weight = random_weight();
  std::vector<Stream*> able;
  double total = 0;
  for (auto& stream : streams)
    if (can_step(*stream)) able.push_back(stream.get()), total += stream->weight;
  if (able.empty()) return false;
  double at = uniform() * total;
  for (Stream* stream : able)
    if ((at -= stream->weight) <= 0) return step(*stream), true;
  return step(*able.back()), true;
}
inline bool step_toward(int number, int depth = 0) {  // run what stands first on a stream, or what that waits for
  Stream& stream = *streams[number];
  if (stream.items.empty() || depth > 200) return false;
  if (can_step(stream)) return step(stream), true;
  Item& first = stream.items.front();
  if (first.wait) return step_toward(first.wait->stream, depth + 1);
  if (first.job)
    for (int needed : first.job->needs())
      if (step_toward(needed, depth + 1)) return true;
  return false;
}
inline bool step_by_schedule(int wanted) { return schedule == LATE ? step_toward(wanted) : step_any(); }
inline void let_time_pass() {  // after something was queued
  if (is_running) return;
  last_call = now();
  if (schedule == EAGER || schedule == EMPTY)
    while (step_any()) {
    }
  else if (schedule == RANDOM)
    while (uniform() < eagerness && step_any()) {
    }
}
inline bool waits_elsewhere() {
  for (auto& stream : streams)
    if (!stream->items.empty() && stream->items.front().job && stream->items.front().begun &&
        stream->items.front().job->is_elsewhere())
      return true;
  return false;
}

// ---- what is queued ----
inline void push(int stream, Item item) {
  Lock lock;
  if (schedule == EMPTY) item.run = nullptr;
  streams[stream]->items.push_back(std::move(item));
  let_time_pass();
}
inline uint64_t launch(
    int stream) {  // a kernel follows what is before it on its stream, and what the host has waited for
  auto& clock = streams[stream]->clock;
  join(clock, host);
  return ++clock[stream];
}
inline TicketPtr record_on(int stream) {
  Lock lock;
  auto ticket = std::make_shared<Ticket>();
  ticket->stream = stream;
  ticket->clock = streams[stream]->clock;
  join(ticket->clock, host);
  if (streams[stream]->items.empty())
    ticket->done = true, ticket->at = now();
  else
    push(stream, Item{"record", nullptr, nullptr, ticket});
  return ticket;
}
inline void wait_on(int stream, const TicketPtr& ticket) {
  Lock lock;
  if (!ticket) return;
  join(streams[stream]->clock, ticket->clock);
  if (!ticket->done && ticket->stream != stream) push(stream, Item{"wait", nullptr, ticket});
}

// ---- the host ----
void settle_frees();  // memory.h

inline void raise_errors() {
  if (errors.empty()) return;
  std::string all;
  for (auto& error : errors) all += error + "; ";
  errors.clear();
  TORCH_CHECK(false, "virtual device: ", all);
}
inline std::string describe_streams() {
  std::string text;
  for (auto& stream : streams) {
    if (stream->items.empty()) continue;
    const Item& first = stream->items.front();
    text += " Stream " + std::to_string(stream->id) + " holds " + std::to_string(stream->items.size()) +
            " items, first " + first.name;
    if (first.wait) text += " for stream " + std::to_string(first.wait->stream);
    if (first.begun) text += ", begun";
    text += ".";
  }
  return text;
}
// Wait until a ticket is reached; return false if it was not within `limit` seconds.
inline bool wait_until(const TicketPtr& ticket, double limit = INFINITY) {
  constexpr double patience = 5;  // how long nothing can run before it is called a deadlock
  if (!ticket) return true;
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  double begun = now(), moved = begun;
  for (;;) {
    {
      Lock lock;
      last_call = now();
      if (ticket->done) {
        join(host, ticket->clock);
        settle_frees();
        raise_errors();
        return true;
      }
      if (step_by_schedule(ticket->stream)) {
        moved = now();
        continue;
      }
      if (waits_elsewhere()) moved = now();
      raise_errors();
    }
    if (now() - begun > limit) return false;
    TORCH_CHECK(now() - moved < patience, "virtual device: nothing can run, and the host waits for stream ",
                ticket->stream, ": a deadlock.", describe_streams());
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}
// Time passes for the device whenever the host looks: more of it if the host does nothing else, and looks again and again.
inline int looks_in_vain = 0;
inline bool look(const TicketPtr& ticket) {
  Lock lock;
  if (!ticket) return true;
  last_call = now();
  if (!ticket->done)
    for (int steps = (chance() % 4) << std::min(looks_in_vain / 16, 8); steps-- > 0 && !ticket->done;) step_any();
  looks_in_vain = ticket->done ? 0 : looks_in_vain + 1;
  if (ticket->done) join(host, ticket->clock);
  return ticket->done;
}

// ---- sleep ----
struct Sleep : Job {
  double seconds, until = 0;
  explicit Sleep(double seconds) : seconds(seconds) {}
  void begin() override { until = now() + seconds; }
  bool is_finished() override { return now() >= until; }
  bool is_elsewhere() const override { return true; }
};

// ---- other processes ----
// A device goes on while its host does something else: other ranks may wait for a collective that is queued here. So a
// thread lets time pass where the host has not called for a while and something is queued that others may wait for.
inline int remote_jobs = 0;  // queued, and not done
inline bool is_keeping_pace = false;
inline void keep_pace() {
  constexpr double idle = 0.01;
  if (std::exchange(is_keeping_pace, true)) return;
  std::thread([] {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      Lock lock;
      if (remote_jobs == 0 || now() - last_call < idle || is_running) continue;
      for (int number = 0; number < (int)streams.size(); number++) {
        bool has_remote = false;
        for (auto& item : streams[number]->items) has_remote |= item.job && item.job->is_elsewhere();
        if (has_remote)
          while (step_by_schedule(number)) {
          }
      }
    }
  }).detach();
}

}  // namespace virtual_device
