// A CUDA device made of host memory, for a CPU build of torch: tensors are "cuda", and what runs on them runs at once.
//
//     operator on cuda tensors  -->  cpu tensors over the same memory  -->  the CPU's kernel  -->  cuda tensors
//
// What works here and not on a GPU is looked for instead:
//
//     two devices in one operator            refused, as a GPU does
//     a wait of the host                     refused while `torch.cuda.set_sync_debug_mode("error")`: a copy that is not
//                                            asynchronous, to or from memory that is not pinned, or a number read
//     a race between streams                 an access that nothing puts behind another stream's: no event that the
//                                            stream, or the host before it queued the access, has waited for
//     memory reused while it is in use       freed, so that its stream may have it, under another stream's access
//     an operator's first use while NCCL     CUDA loads its kernel then, for which it may wait for all that runs; and
//     receives                               the peer may be waiting for what comes behind that operator
//
// Order is by vector clocks (Lamport 1978, Mattern 1989): a stream, an event and a host thread each know how far every
// stream had come. Python tells of events and of what threads tell each other (`cuda.py`).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace {

using namespace c10;
using at::Tensor;

constexpr int kDevices = 4;
constexpr int64_t kBlockBytes = 512;  // what CUDA's allocator rounds up to
const DispatchKeySet kGpu(DispatchKey::CUDA);

// ---------------------------------------------------------------------------------------------------- what is current

using Queue = int64_t;  // a stream among those of all devices

thread_local DeviceIndex t_device = 0;
thread_local std::array<StreamId, kDevices> t_streams{};
std::atomic<StreamId> g_last_stream{0};

Queue queue_of(DeviceIndex device, StreamId stream) { return (Queue(device) << 32) | stream; }
Queue current_queue() { return queue_of(t_device, t_streams[t_device]); }
std::string named(Queue queue) {
  return "stream " + std::to_string(queue & 0xffffffff) + " of cuda:" + std::to_string(queue >> 32);
}

struct OnDevice {  // `device` is current, as in CUDA's guards
  explicit OnDevice(std::optional<Device> device) : before(t_device) {
    if (device && device->index() >= 0) t_device = device->index();
  }
  ~OnDevice() { t_device = before; }
  DeviceIndex before;
};

// --------------------------------------------------------------------------------------------------------- what races

using Clock = std::map<Queue, uint64_t>;

struct Access {
  Queue queue;
  uint64_t at;
  std::string what;
};

struct Uses {  // of one block of memory, since it was last written to
  std::optional<Access> write;
  std::map<Queue, Access> reads;
  std::set<Queue> recorded;  // by record_stream: the allocator waits for them
};

std::recursive_mutex g_order;
std::map<Queue, Clock> g_queues;
std::map<int64_t, Clock> g_events;
Clock g_seen;              // by any thread of the host
thread_local Clock t_seen;  // by this one
std::vector<std::string> g_races;

std::array<int, kDevices> g_receiving{};
std::array<std::set<std::string>, kDevices> g_loaded;

using Locked = std::lock_guard<std::recursive_mutex>;

void learn(Clock& clock, const Clock& from) {
  for (auto [queue, at] : from) clock[queue] = std::max(clock[queue], at);
}

bool knows(const Clock& clock, const Access& access) {
  auto found = clock.find(access.queue);
  return found != clock.end() && found->second >= access.at;
}

int64_t new_event(const Clock& clock) {
  int64_t event = int64_t(g_events.size()) + 1;
  g_events[event] = clock;
  return event;
}

void see(const Clock& clock) {
  learn(t_seen, clock);
  learn(g_seen, clock);
}

void judge(const Access& now, const char* verb, const std::optional<Access>& earlier, const char* their_verb) {
  if (earlier && earlier->queue != now.queue && !knows(g_queues[now.queue], *earlier))
    g_races.push_back(now.what + " on " + named(now.queue) + " " + verb + " what " + earlier->what + " on " +
                      named(earlier->queue) + " may still " + their_verb);
}

void use(Uses& uses, const Access& now, bool writes) {
  judge(now, writes ? "writes" : "reads", uses.write, "write");
  if (!writes) {
    uses.reads[now.queue] = now;
    return;
  }
  for (auto& [_, read] : uses.reads) judge(now, "writes", read, "read");
  uses.reads.clear();
  uses.write = now;
}

Access next_access(Queue queue, const std::string& what) {
  Clock& clock = g_queues[queue];
  learn(clock, t_seen);
  return {queue, ++clock[queue], what};
}

void judge_freed(const Uses& uses, Queue owner, const Access& access) {
  Clock known = g_queues[owner];
  learn(known, g_seen);  // whoever let go of it before: what has been seen to be over is over
  if (access.queue != owner && !uses.recorded.count(access.queue) && !knows(known, access))
    g_races.push_back("memory of " + named(owner) + " is free for it again while " + access.what + " on " +
                      named(access.queue) + " may still use it");
}

// ------------------------------------------------------------------------------------------------------------- memory

struct Block {
  void* data;
  int64_t num_bytes;
  Queue owner;
  Uses uses;
};

std::map<void*, Block*> g_blocks;    // by where they begin
std::map<void*, Block*> g_pinned;    // the same, of the host's pinned memory
std::array<std::atomic<int64_t>, kDevices> g_now{}, g_peak{};

Block* block_at(const std::map<void*, Block*>& blocks, const void* data) {
  auto next = blocks.upper_bound(const_cast<void*>(data));
  if (next == blocks.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return data < static_cast<char*>(block->data) + block->num_bytes ? block : nullptr;
}

Block* new_block(std::map<void*, Block*>& blocks, size_t num_bytes) {
  int64_t rounded = std::max<int64_t>(1, (num_bytes + kBlockBytes - 1) / kBlockBytes) * kBlockBytes;
  auto* block = new Block{std::aligned_alloc(64, rounded), rounded, current_queue(), {}};
  Locked lock(g_order);
  blocks[block->data] = block;
  return block;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Locked lock(g_order);
    if (block->uses.write) judge_freed(block->uses, block->owner, *block->uses.write);
    for (auto& [_, read] : block->uses.reads) judge_freed(block->uses, block->owner, read);
    g_blocks.erase(block->data);
  }
  g_now[block->owner >> 32] -= block->num_bytes;
  std::free(block->data);
  delete block;
}

void free_pinned(void* context) {  // torch's own allocator waits for what still uses it
  auto* block = static_cast<Block*>(context);
  {
    Locked lock(g_order);
    g_pinned.erase(block->data);
  }
  std::free(block->data);
  delete block;
}

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, Device(DeviceType::CUDA, t_device)};
    Block* block = new_block(g_blocks, num_bytes);
    int64_t now = g_now[t_device] += block->num_bytes, peak = g_peak[t_device];
    while (now > peak && !g_peak[t_device].compare_exchange_weak(peak, now)) {
    }
    return {block->data, block, &free_block, Device(DeviceType::CUDA, t_device)};
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
} g_device_allocator;

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t num_bytes) override {
    Block* block = new_block(g_pinned, num_bytes);
    return {block->data, block, &free_pinned, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
} g_pinned_allocator;

bool is_pinned(const void* data) {
  Locked lock(g_order);
  return block_at(g_pinned, data) != nullptr;
}

Uses* uses_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.storage().data()) return nullptr;
  Block* block = block_at(tensor.is_cuda() ? g_blocks : g_pinned, tensor.storage().data());
  return block ? &block->uses : nullptr;
}

DeviceIndex device_of(const std::vector<Tensor>& tensors, DeviceIndex otherwise) {
  for (auto& tensor : tensors)
    if (tensor.defined() && tensor.is_cuda()) return tensor.device().index();
  return otherwise;
}

void use_all(const std::string& what, const std::vector<Tensor>& read, const std::vector<Tensor>& written) {
  Locked lock(g_order);
  DeviceIndex device = device_of(written, device_of(read, t_device));
  if (g_loaded[device].insert(what).second && g_receiving[device])
    g_races.push_back(what + " is first used on cuda:" + std::to_string(device) + " while NCCL receives");
  Access now = next_access(queue_of(device, t_streams[device]), what);
  for (auto& tensor : read)
    if (Uses* uses = uses_of(tensor)) use(*uses, now, false);
  for (auto& tensor : written)
    if (Uses* uses = uses_of(tensor)) use(*uses, now, true);
}

// ------------------------------------------------------------------------------------------------------ waiting hosts

std::atomic<bool> g_refuses_waits{false};

void host_waits(const std::string& why, DeviceIndex device) {
  TORCH_CHECK(!g_refuses_waits, "called a synchronizing CUDA operation: ", why);
  Locked lock(g_order);
  see(g_queues[queue_of(device, t_streams[device])]);
}

// ------------------------------------------------------------------------------------- what torch asks of a device type

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, t_device); }
  void setDevice(Device device) const override {
    if (device.index() >= 0) t_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device device) const override { return stream(device, t_streams[index(device)]); }
  Stream getNewStream(Device device, int = 0) const override { return stream(device, ++g_last_stream); }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    t_streams[index(next.device())] = next.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    Locked lock(g_order);
    if (!*event) *event = new int64_t;
    *static_cast<int64_t*>(*event) = new_event(g_queues[queue_of(stream.device_index(), stream.id())]);
  }
  void block(void* event, const Stream& stream) const override {
    Locked lock(g_order);
    if (event) learn(g_queues[queue_of(stream.device_index(), stream.id())], g_events[*static_cast<int64_t*>(event)]);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<int64_t*>(event); }

  static DeviceIndex index(Device device) { return device.index() < 0 ? t_device : device.index(); }
  static Stream stream(Device device, StreamId id) {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index(device)), id);
  }
};

impl::DeviceGuardImplRegistrar g_guard(DeviceType::CUDA, new Guard);

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {  // looked up by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return t_device; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(DeviceIndex device) const override { t_device = device; }
  Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &g_device_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static const Generator generator = make_generator<CPUGeneratorImpl>(0);
    return generator;
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

// ---------------------------------------------------------------------------------------------------------- operators

namespace {

Tensor on_cpu(const Tensor& tensor) {  // over the same memory
  Storage whole = tensor.storage();
  auto release = [](void* kept) { delete static_cast<Storage*>(kept); };
  DataPtr data(whole.mutable_data(), new Storage(whole), release, Device(DeviceType::CPU));
  Storage storage(Storage::use_byte_size_t(), whole.nbytes(), std::move(data), GetCPUAllocator(), /*resizable=*/true);
  Tensor out =
      at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

Tensor view_of(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides, int64_t offset) {
  Tensor view = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(tensor.storage()), tensor.key_set(),
                                                    tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

Tensor on_gpu(const Tensor& made, DeviceIndex device, const std::string& what) {
  OnDevice guard(Device(DeviceType::CUDA, device));
  Tensor out = at::detail::empty_strided_generic(made.sizes(), made.strides(), &g_device_allocator, kGpu,
                                                 made.scalar_type());
  on_cpu(out).copy_(made);
  use_all(what, {}, {out});
  return out;
}

bool takes_indices_of_the_host(const std::string& name) {
  return name == "aten::index.Tensor" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
}

// The tensors of one call, and what stands for them on the CPU.
class Call {
 public:
  Call(const OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()), name_(toString(op.operator_name())), stack_(stack) {}

  void run(const OperatorHandle& op) {
    note_uses();
    for (size_t i = 0; i < schema_.arguments().size(); i++) argument(i) = in(argument(i));
    TORCH_CHECK(!mixes_ || seen_.empty(), "Expected all tensors to be on the same device, but found at least two "
                "devices, cuda:", int(device_), " and cpu! (", name_, ")");
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
    for (auto& [gpu, cpu] : seen_) take_over(gpu, cpu);
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); i++) stack_[i] = out(stack_[i]);
  }

 private:
  IValue& argument(size_t index) { return stack_[stack_.size() - schema_.arguments().size() + index]; }

  bool makes_views() const {
    return !schema_.returns().empty() && schema_.returns()[0].alias_info() &&
           !schema_.returns()[0].alias_info()->isWrite();
  }

  void note_uses() {
    std::vector<Tensor> read, written;
    for (size_t i = 0; i < schema_.arguments().size() && !makes_views(); i++) {
      auto* alias = schema_.arguments()[i].alias_info();
      for (auto& tensor : tensors_in(argument(i))) (alias && alias->isWrite() ? written : read).push_back(tensor);
    }
    use_all(name_, read, written);
  }

  static std::vector<Tensor> tensors_in(const IValue& value) {
    if (value.isTensor()) return {value.toTensor()};
    if (value.isTensorList()) return value.toTensorVector();
    std::vector<Tensor> found;
    if (value.isOptionalTensorList())
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) found.push_back(tensor.value_or(Tensor()));
    return found;
  }

  IValue in(const IValue& value) {
    if (value.isTensor()) return in(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (auto& tensor : tensors_in(value)) list.push_back(in(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (auto& tensor : tensors_in(value)) list.push_back(tensor.defined() ? std::optional(in(tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = Guard::index(value.toDevice());
      return Device(DeviceType::CPU);
    }
    return value;
  }

  Tensor in(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {  // a number may come from anywhere
      mixes_ = mixes_ || (tensor.dim() > 0 && !takes_indices_of_the_host(name_));
      return tensor;
    }
    TORCH_CHECK(seen_.empty() || tensor.device().index() == device_, "Expected all tensors to be on the same device, "
                "but found at least two devices, cuda:", int(device_), " and ", tensor.device(), "! (", name_, ")");
    device_ = tensor.device().index();
    for (auto& [gpu, cpu] : seen_)
      if (gpu.is_same(tensor)) return cpu;
    seen_.emplace_back(tensor, on_cpu(tensor));
    return seen_.back().second;
  }

  // An out= argument may have been given another size, and then other memory.
  void take_over(const Tensor& gpu, const Tensor& cpu) const {
    if (gpu.sizes() == cpu.sizes() && gpu.storage().data() == cpu.storage().data()) return;
    Tensor moved = on_gpu(cpu, gpu.device().index(), name_);
    gpu.unsafeGetTensorImpl()->set_storage_keep_dtype(moved.storage());
    gpu.unsafeGetTensorImpl()->set_sizes_and_strides(moved.sizes(), moved.strides(), 0);
  }

  IValue out(const IValue& value) {
    if (value.isTensor()) return out(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (auto& tensor : tensors_in(value)) list.push_back(out(tensor));
    return list;
  }

  Tensor out(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [gpu, cpu] : seen_) {
      if (cpu.is_same(tensor)) return gpu;
      if (tensor.numel() && cpu.storage().data() == tensor.storage().data())
        return view_of(gpu, tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }
    return on_gpu(tensor, device_, name_);
  }

  const FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack& stack_;
  std::vector<std::pair<Tensor, Tensor>> seen_;  // on the device, and over the same memory on the CPU
  DeviceIndex device_ = t_device;
  bool mixes_ = false;
};

void any_operator(const OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(op); }

Tensor empty(IntArrayRef sizes, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice guard(device);
  return at::detail::empty_generic(sizes, &g_device_allocator, kGpu, dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &g_device_allocator, kGpu, dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  use_all("copy_", {from}, {self});
  (self.is_cuda() ? on_cpu(self) : self).copy_(from.is_cuda() ? on_cpu(from) : from);
  if (self.is_cuda() != from.is_cuda()) {
    const Tensor &gpu = self.is_cuda() ? self : from, &host = self.is_cuda() ? from : self;
    if (!non_blocking || !is_pinned(host.storage().data())) host_waits("copy_", gpu.device().index());
  }
  return self;
}

Scalar read_number(const Tensor& tensor) {
  use_all("item", {tensor}, {});
  host_waits("item", tensor.device().index());
  return at::_local_scalar_dense(on_cpu(tensor));
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, std::optional<MemoryFormat>) {
  int64_t num_bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (num_bytes > int64_t(self.storage().nbytes())) {
    OnDevice guard(self.device());
    DataPtr data = g_device_allocator.allocate(num_bytes);
    std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(data));
    self.storage().set_nbytes(num_bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return view_of(self, sizes, strides, offset.value_or(self.storage_offset()));
}

Tensor view(const Tensor& self, IntArrayRef sizes) {
  Tensor seen = on_cpu(self).view(sizes);
  return view_of(self, seen.sizes(), seen.strides(), self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  return view_of(self, sizes, strides, self.storage_offset());
}

Tensor& set_storage(Tensor& self, Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

void record_stream(Tensor& tensor, Stream stream) {
  Locked lock(g_order);
  if (Uses* uses = uses_of(tensor)) uses->recorded.insert(queue_of(stream.device_index(), stream.id()));
}

// Fused where the CPU can: without dropout.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double dropout, bool,
                         std::optional<double>, bool) {
  return int64_t(dropout > 0 ? sdp::SDPBackend::math : sdp::SDPBackend::flash_attention);
}

using Attended = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;

Attended attend(const Tensor& q, const Tensor& k, const Tensor& v, double, bool causal, bool,
                std::optional<double> scale) {
  use_all("attention", {q, k, v}, {});
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(on_cpu(q), on_cpu(k), on_cpu(v), 0.0, causal,
                                                                          std::nullopt, scale);
  DeviceIndex device = q.device().index();
  auto to_gpu = [&](const Tensor& made) { return on_gpu(made, device, "attention"); };
  Tensor none, state = to_gpu(at::zeros({2}, at::kLong));
  return {to_gpu(out), to_gpu(logsumexp), none, none, q.size(2), k.size(2), state, none, none};
}

std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                                                   const Tensor&, const Tensor&, SymInt, SymInt, double, bool causal,
                                                   const Tensor&, const Tensor&, std::optional<double> scale) {
  use_all("attention backward", {grad, q, k, v, out, logsumexp}, {});
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_cpu(grad), on_cpu(q), on_cpu(k), on_cpu(v), on_cpu(out), on_cpu(logsumexp), 0.0, causal, std::nullopt, scale);
  auto to_gpu = [&](const Tensor& made) { return on_gpu(made, q.device().index(), "attention backward"); };
  return {to_gpu(dq), to_gpu(dk), to_gpu(dv)};
}

void touch(const Tensor& tensor, bool writes) {
  std::vector<Tensor> tensors{tensor};
  writes ? use_all("a collective", {}, tensors) : use_all("a collective", tensors, {});
}

}  // namespace

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", read_number);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_scaled_dot_product_flash_attention", attend);
  m.impl("_scaled_dot_product_flash_attention_backward", attend_backward);
}

TORCH_LIBRARY(cuda_on_cpu, m) {
  m.def("host(Tensor tensor) -> Tensor");
  m.def("touch(Tensor tensor, bool writes) -> ()");
}

TORCH_LIBRARY_IMPL(cuda_on_cpu, CUDA, m) {
  m.impl("host", on_cpu);
  m.impl("touch", touch);
}

// ------------------------------------------------------------------------------------------------------ for __init__.py

extern "C" {

int num_devices() { return kDevices; }
int64_t memory_now(int device) { return g_now[device]; }
int64_t memory_peak(int device) { return g_peak[device]; }
void reset_peak(int device) { g_peak[device] = g_now[device].load(); }
void refuse_waits(bool refused) { g_refuses_waits = refused; }

int64_t record(int device, int64_t stream) {
  Locked lock(g_order);
  Clock& clock = g_queues[queue_of(device, stream)];
  learn(clock, t_seen);
  return new_event(clock);
}

void wait(int device, int64_t stream, int64_t event) {
  Locked lock(g_order);
  learn(g_queues[queue_of(device, stream)], g_events[event]);
}

void see_event(int64_t event) {  // the host has seen that it is over, or another thread has told this one what it knows
  Locked lock(g_order);
  see(g_events[event]);
}

void see_all() {
  Locked lock(g_order);
  for (auto& [_, clock] : g_queues) see(clock);
}

int64_t tell() {
  Locked lock(g_order);
  return new_event(t_seen);
}

void receiving(int device, int more) {
  Locked lock(g_order);
  g_receiving[device] += more;
}

void use_raw(const void* data, bool writes, int device, int64_t stream, const char* what) {
  Locked lock(g_order);
  if (Block* block = block_at(g_blocks, data)) use(block->uses, next_access(queue_of(device, stream), what), writes);
}

int64_t take_races(char* text, int64_t size) {  // how many; the first ones a line each
  Locked lock(g_order);
  std::string lines;
  for (auto& race : g_races) lines += race + "\n";
  std::strncpy(text, lines.c_str(), size - 1);
  int64_t count = g_races.size();
  g_races.clear();
  for (auto& loaded : g_loaded) loaded.clear();  // each test is taken for a process of its own
  return count;
}
}
