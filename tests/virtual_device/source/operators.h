// Operators on the device: a kernel is PyTorch's own CPU kernel, queued on the current stream.
//
// One boxed fallback serves all operators that have no kernel of their own below: it asks the meta device for the shape
// of the answer, returns tensors of that shape at once, and queues the CPU kernel on aliases of their memory. Where no
// shape can be known beforehand the host waits, as it does for CUDA.
#pragma once
#include "internals.h"
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <sstream>

namespace virtual_device {

using at::Tensor;
using torch::jit::Stack;
using Storages = std::map<void*, c10::Storage>;  // those of the device, and their aliases on the CPU

inline void run_below_python(const std::function<void()>& kernel) {
  using c10::DispatchKey;
  c10::impl::ExcludeDispatchKeyGuard python{
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher})};
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView below;
  at::DisableRecordFunctionGuard unobserved;
  kernel();
}

// A CPU tensor in the same memory. It does not keep device memory alive: a kernel may run after its tensor was freed.
inline Tensor alias_of(const Tensor& tensor, Storages& known) {
  void* own = tensor.storage().unsafeGetStorageImpl();
  if (!known.count(own)) {
    auto& storage = tensor.storage();
    known[own] = !tensor.is_cuda() ? storage
                                   : c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                                                  at::DataPtr((void*)storage.data(), at::kCPU), nullptr, false);
  }
  Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(known[own]),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  impl->set_storage_offset(tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}
inline Tensor alias_of(const Tensor& tensor) {
  Storages known;
  return alias_of(tensor, known);
}

template <class F>
c10::IValue mapped(const c10::IValue& value, F change) {
  auto changed = [&](const Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return changed(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(changed(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(changed(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}
template <class F>
void each_tensor(const c10::IValue& value, F visit) {
  mapped(value, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}
inline bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// ---- the fallback ----
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<c10::IValue> arguments;
  int device = -1, stream = 0;

  Call(const c10::OperatorHandle& op, const Stack& stack)
      : op(op), schema(op.schema()), name(c10::toString(schema.operator_name())) {
    if (name.rfind("aten::", 0) == 0) name = name.substr(6);
    arguments.assign(stack.end() - schema.arguments().size(), stack.end());
    for (auto& argument : arguments)
      each_tensor(argument, [&](const Tensor& tensor) {
        if (tensor.is_cuda() && device < 0) device = tensor.device().index();
        TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_sparse(), "virtual device: ", name,
                                    " of sparse tensors is not modelled");
      });
    if (device < 0) device = current_device;
    stream = stream_of(device);
    for (auto& argument : arguments)
      each_tensor(argument, [&](const Tensor& tensor) {
        bool fits = tensor.is_cuda() ? tensor.device().index() == device : tensor.dim() == 0;
        TORCH_CHECK(fits, "Expected all tensors to be on the same device: ", name, " got one on ", tensor.device());
      });
  }
};

inline Tensor meta_of(const Tensor& tensor) {
  Tensor meta =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}
inline bool says_no_shape(const std::string& error) {
  for (auto part : {"Meta", "meta", "data-dependent", "nonzero"})
    if (error.find(part) != error.npos) return true;
  return false;
}
// The shapes that a call returns, which depend on nothing but the shapes and numbers that it is given. Asking the meta
// device takes PyTorch up to a millisecond, for many of its kernels are written in Python; so each call is asked for
// once.
struct Shapes {
  bool are_known = true;                                         // without running it
  std::vector<std::pair<size_t, std::vector<int64_t>>> resized;  // out= arguments, and their new sizes
  std::vector<std::pair<std::optional<size_t>, c10::IValue>>
      returns;  // the argument that is returned, or tensors on meta
};
inline auto& known_shapes = *new std::map<std::string, Shapes>;

inline std::string key_of(const Call& call) {
  std::ostringstream key;
  key << c10::toString(call.schema.operator_name());
  for (auto& argument : call.arguments) {
    key << '|';
    bool has_tensors = false;
    each_tensor(argument, [&](const Tensor& tensor) {
      has_tensors = true;
      key << tensor.sizes() << tensor.strides() << tensor.scalar_type() << tensor.is_cuda()
          << tensor.unsafeGetTensorImpl()->is_wrapped_number();
    });
    if (argument.isOptionalTensorList())
      for (const auto& tensor : argument.toOptionalTensorVector()) key << (tensor && tensor->defined());
    else if (argument.isObject() || argument.isGenerator())
      key << "object";
    else if (!has_tensors)
      key << argument.tagKind() << argument;
  }
  return key.str();
}
inline Shapes ask_for_shapes(Call& call) {
  Shapes shapes;
  for (auto& result : call.schema.returns()) {
    bool is_tensor = result.type()->isSubtypeOf(*c10::TensorType::get());
    if (!is_tensor && result.type()->kind() != c10::TypeKind::ListType) return {false};
  }
  std::vector<std::pair<Tensor, Tensor>> made;
  auto to_meta = [&](const Tensor& tensor) {
    if (!tensor.is_cuda()) return tensor;  // a number
    for (auto& [from, meta] : made)
      if (from.is_same(tensor)) return meta;
    made.emplace_back(tensor, meta_of(tensor));
    return made.back().second;
  };
  Stack stack;
  for (auto& argument : call.arguments)
    stack.push_back(argument.isDevice() ? c10::IValue(at::Device(at::kMeta)) : mapped(argument, to_meta));
  std::vector<c10::IValue> given(stack.begin(), stack.end());
  try {
    c10::impl::ExcludeDispatchKeyGuard autocast(c10::autocast_dispatch_keyset);
    at::AutoDispatchBelowADInplaceOrView below;
    at::DisableRecordFunctionGuard unobserved;
    call.op.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    return {false};
  } catch (const pybind11::error_already_set&) {
    return {false};
  } catch (const c10::Error& error) {
    if (!says_no_shape(error.what())) throw;  // the user's mistake
    return {false};
  }
  auto& arguments = call.schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!writes(arguments[i]) || !given[i].isTensor() || !given[i].toTensor().defined()) continue;
    auto wanted = given[i].toTensor().sizes();
    if (wanted != call.arguments[i].toTensor().sizes()) shapes.resized.emplace_back(i, wanted.vec());
  }
  for (size_t r = 0; r < stack.size(); r++) {
    auto* alias = call.schema.returns()[r].alias_info();
    std::optional<size_t> returned;
    if (alias && alias->isWrite())
      for (size_t i = 0; i < arguments.size(); i++)
        if (writes(arguments[i]) && arguments[i].alias_info()->beforeSets() == alias->beforeSets()) returned = i;
    shapes.returns.emplace_back(returned, returned ? c10::IValue() : stack[r]);
  }
  return shapes;
}
// What the call returns, not yet computed: arguments that it writes, or new tensors. Nothing if only running it can
// tell.
inline std::optional<Stack> results_of(Call& call) {
  std::string key = key_of(call);
  std::optional<Shapes> shapes;
  {
    Lock lock;
    if (auto found = known_shapes.find(key); found != known_shapes.end()) shapes = found->second;
  }
  if (!shapes) {
    shapes = ask_for_shapes(call);  // without the lock: it may take the interpreter's
    Lock lock;
    known_shapes[key] = *shapes;
  }
  if (!shapes->are_known) return std::nullopt;
  for (auto& [i, sizes] : shapes->resized) at::native::resize_output(call.arguments[i].toTensor(), sizes);
  c10::DeviceGuard there({at::kCUDA, (DeviceIndex)call.device});
  Stack results;
  for (auto& [argument, meta] : shapes->returns)
    results.push_back(argument ? call.arguments[*argument] : mapped(meta, [&](const Tensor& shape) {
      return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(at::kCUDA));
    }));
  return results;
}
inline void touch_arguments(Call& call, uint64_t time) {
  for (size_t i = 0; i < call.arguments.size(); i++)
    each_tensor(call.arguments[i], [&](const Tensor& tensor) {
      if (tensor.is_cuda()) touch(tensor, writes(call.schema.arguments()[i]), call.stream, time, call.name);
    });
}

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call call(op, *stack);
  auto results = results_of(call);
  Storages storages;
  auto on_cpu = std::make_shared<Stack>();
  for (size_t i = 0; i < call.arguments.size(); i++) {
    auto& argument = call.arguments[i];
    bool draws =
        argument.isNone() && call.schema.arguments()[i].type()->annotation_str().find("Generator") != std::string::npos;
    if (argument.isDevice())
      on_cpu->push_back(at::Device(at::kCPU));
    else if (draws)
      on_cpu->push_back(at::detail::createCPUGenerator(
          at::check_generator<at::CPUGeneratorImpl>(generator_of(call.device))->random64()));
    else
      on_cpu->push_back(mapped(argument, [&](const Tensor& tensor) {
        if (tensor.is_cuda()) return alias_of(tensor, storages);
        Tensor copy = tensor.detach().clone();  // the host may write to its own before the kernel runs
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      }));
  }
  torch::jit::drop(*stack, call.arguments.size());
  if (!results) {  // the host must know the answer: it waits
    would_wait(call.name);
    {
      Lock lock;
      kernels++;
      touch_arguments(call, launch(call.stream));
    }
    wait_for_stream(call.stream);
    run_below_python([&] { op.callBoxed(on_cpu.get()); });
    c10::DeviceGuard there({at::kCUDA, (DeviceIndex)call.device});
    for (auto& result : *on_cpu)
      stack->push_back(mapped(result, [&](const Tensor& computed) {
        Tensor tensor = at::empty_strided(computed.sizes(), computed.strides(), computed.options().device(at::kCUDA));
        alias_of(tensor).copy_(computed);
        Lock lock;
        touch(tensor, true, call.stream, launch(call.stream), call.name);
        return tensor;
      }));
    return;
  }
  auto outputs = std::make_shared<std::vector<std::vector<Tensor>>>();  // new tensors, into which answers are copied
  Lock lock;
  kernels++;
  uint64_t time = launch(call.stream);
  touch_arguments(call, time);
  for (size_t r = 0; r < results->size(); r++) {
    outputs->emplace_back();
    if (auto* alias = call.schema.returns()[r].alias_info(); alias && alias->isWrite()) continue;
    each_tensor((*results)[r], [&](const Tensor& tensor) {
      outputs->back().push_back(alias_of(tensor, storages));
      touch(tensor, true, call.stream, time, call.name);
    });
  }
  push(call.stream, Item{call.name, [handle = op, on_cpu, outputs] {
                           handle.callBoxed(on_cpu.get());
                           for (size_t r = 0; r < outputs->size(); r++) {
                             size_t k = 0;
                             if (!(*outputs)[r].empty())
                               each_tensor((*on_cpu)[r],
                                           [&](const Tensor& computed) { (*outputs)[r][k++].copy_(computed); });
                           }
                         }});
  for (auto& result : *results) stack->push_back(std::move(result));
}

// ---- operators of their own ----
inline c10::ScalarType dtype_of(std::optional<c10::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}
using Layout = std::optional<at::Layout>;
inline Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype, Layout,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard there(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype_of(dtype), format);
}
inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> dtype, Layout,
                            std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard there(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype_of(dtype));
}

inline void queue_copy(int stream, const Tensor& to, const Tensor& from, const Tensor& read, const std::string& name) {
  Tensor target = alias_of(to), source = (from.is_same(read) ? alias_of(from) : read).expand_as(target);
  Lock lock;
  kernels++;
  uint64_t time = launch(stream);
  touch(to, true, stream, time, name);
  if (from.is_same(read)) touch(from, false, stream, time, name);
  push(stream, Item{name, [target, source] { target.copy_(source); }});
}
inline Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from) || to.numel() == 0) return to;
  TORCH_CHECK_NOT_IMPLEMENTED(!to.is_sparse() && !from.is_sparse(),
                              "virtual device: copies of sparse tensors are not modelled");
  bool to_device = to.is_cuda(), from_device = from.is_cuda();
  int stream = stream_of((to_device ? to : from).device().index());
  if (to_device && from_device) {
    if (to.device() == from.device()) return queue_copy(stream, to, from, from, "copy_"), to;
    int other = stream_of(from.device().index());  // both devices' streams wait for it
    wait_on(other, record_on(stream));
    queue_copy(other, to, from, from, "copy_ between devices");
    wait_on(stream, record_on(other));
    return to;
  }
  if (from.dtype() != to.dtype()) {  // the device casts
    if (to_device) return copy_(to, from.to(to.device(), non_blocking), non_blocking);
    return copy_(to, from.to(to.dtype()), non_blocking);
  }
  const Tensor& on_host = to_device ? from : to;
  bool pinned = is_pinned(on_host.storage().data());
  bool is_asynchronous = non_blocking && pinned && on_host.is_non_overlapping_and_dense();
  if (!non_blocking || (!to_device && !is_asynchronous)) would_wait("copy_");
  if (to_device) {  // pageable memory is read now
    queue_copy(stream, to, from, pinned ? from : from.detach().clone(), "copy_ to the device");
    if (!non_blocking) wait_for_stream(stream);
  } else {
    queue_copy(stream, to, from, from, "copy_ to the host");
    if (!is_asynchronous) wait_for_stream(stream);
  }
  return to;
}
inline at::Scalar local_scalar(const Tensor& tensor) {
  would_wait("item");
  int stream = stream_of(tensor.device().index());
  {
    Lock lock;
    touch(tensor, false, stream, launch(stream), "item");
  }
  wait_for_stream(stream);
  at::Scalar number;
  run_below_python([&] { number = alias_of(tensor).item(); });
  return number;
}
inline void record_stream(Tensor& tensor, c10::Stream stream) {
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}
// Its memory is another one then; what was in it is copied.
inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard there(storage->device());
  auto other = bytes ? device_allocator.allocate(bytes) : at::DataPtr(nullptr, storage->device());
  if (size_t kept = std::min(storage->nbytes(), bytes)) {
    auto alias = [](const void* data, size_t count) {
      return at::from_blob((void*)data, {(int64_t)count}, at::kByte);
    };
    Tensor target = alias(other.get(), kept), source = alias(storage->data(), kept);
    Lock lock;
    launch(stream_of(current_device));
    push(stream_of(current_device), Item{"resize_", [target, source] { target.copy_(source); }});
  }
  storage->set_data_ptr(std::move(other));
  storage->set_nbytes(bytes);
}
inline const Tensor& resize_(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, tensor.element_size(), tensor.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) resize_storage(storage, bytes);
  return tensor;
}
inline Tensor& set_storage(Tensor& tensor, c10::Storage storage, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride);
  impl->set_storage_offset(offset);
  return tensor;
}
inline Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// ---- the host's own accesses of pinned memory ----
// Every CPU kernel is seen on its way through the dispatcher. What views, queues or only asks for shapes has no kernel
// of the CPU's own, or says in its schema that what it returns is its argument's memory.
inline std::unique_ptr<at::ObserverContext> observe(const at::RecordFunction& function) {
  if (!has_pinned) return nullptr;
  auto op = function.operator_name();
  auto handle = op ? c10::Dispatcher::singleton().findSchema(*op) : std::nullopt;
  if (!handle || (op->name != "aten::copy_" && !handle->hasKernelForDispatchKey(c10::DispatchKey::CPU))) return nullptr;
  auto& arguments = handle->schema().arguments();
  auto inputs = function.inputs();
  bool accesses = true, pinned = false;
  for (size_t i = 0; i < arguments.size() && i < inputs.size(); i++) {
    accesses &= !arguments[i].alias_info() || arguments[i].alias_info()->isWrite();
    each_tensor(inputs[i], [&](const Tensor& tensor) {
      accesses &= tensor.device().is_cpu();
      pinned |= tensor.device().is_cpu() && tensor.has_storage() && is_pinned(tensor.storage().data());
    });
  }
  if (!accesses || !pinned) return nullptr;
  for (size_t i = 0; i < arguments.size() && i < inputs.size(); i++)
    each_tensor(inputs[i],
                [&](const Tensor& tensor) { touch_by_host(tensor, writes(arguments[i]), op->name.substr(6)); });
  return nullptr;
}
inline void observe_the_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&observe).needsInputs(true).scopes(
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

}  // namespace virtual_device

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&virtual_device::fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &virtual_device::empty);
  m.impl("empty_strided", &virtual_device::empty_strided);
  m.impl("copy_", &virtual_device::copy_);
  m.impl("_local_scalar_dense", &virtual_device::local_scalar);
  m.impl("record_stream", &virtual_device::record_stream);
  m.impl("resize_", &virtual_device::resize_);
  m.impl("set_.source_Storage_storage_offset", &virtual_device::set_storage);
  m.impl("set_.source_Tensor", &virtual_device::set_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}
