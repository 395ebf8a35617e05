// paged_attention on the CPU: plans the batch, and lets threads pull its items of work. attention_decode.h and
// attention_prefill.h do the work, attention_plan.h says how it is cut.
#include <cstdlib>

#include "cpu/attention_bytes.h"
#include "cpu/attention_decode.h"
#include "cpu/attention_int8.h"
#include "cpu/attention_plan.h"
#include "cpu/attention_prefill.h"
#include "cpu/kernels.h"

namespace paged_kv::cpu::PAGED_KV_ISA {
namespace {

// Multiply-adds that are worth another thread: some 5 us, where a thread that waits for work starts within 2. One token
// on 64 takes 21 us with two threads and 29 with one.
constexpr int64_t kWorkPerThread = 1 << 18;

struct Plan {
  SequencePlan* sequences;  // [num_seqs]
  WorkItem* items;          // [num_items]
  int64_t num_items = 0, num_partials = 0, num_counts = 0;
  int64_t decode_rows = 0, decode_all_rows = 0;  // most rows of a head, and of all heads of an item
  int64_t prefill_rows = 0;                      // most rows of an item
  int64_t num_workers = 1;
};

// Cuts every sequence; fills in all but the items, which `num_items` only counts.
void plan_sequences(const AttentionParams& p, int num_threads, Plan& plan) {
  const int64_t group = p.num_q_heads / p.num_kv_heads;
  int64_t decode_parts = 0, work = 0;  // multiply-adds of both products
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    plan.sequences[seq] = plan_sequence(p, seq);
    const SequencePlan& sequence = plan.sequences[seq];
    if (sequence.is_decode) decode_parts += sequence.num_parts;
    if (sequence.num_parts > 0) {
      const KeyRange keys = sequence.view.visible_keys(p, 0, sequence.view.query_len);
      work += 2 * std::max<int64_t>(0, keys.end - keys.begin) * sequence.view.query_len * p.num_q_heads * p.head_dim;
    }
  }
  plan.num_workers = std::clamp<int64_t>(work / kWorkPerThread, 1, num_threads);
  // All heads of a split in one item read whole blocks in order, and find its tokens once, but a few items would leave
  // threads idle. The heads of a single split are alike, so that half as many items do, which takes 0.97 of the time;
  // one a thread would wait for a thread that slept and comes some 2 us late.
  int64_t heads = heads_are_neighbours(p.key_cache) ? p.num_kv_heads : 1;
  if (plan.num_workers > 1) {
    const int64_t items = plan.num_workers * (decode_parts == 1 ? kItemsPerThread / 2 : kItemsPerThread);
    heads = std::clamp<int64_t>(decode_parts * p.num_kv_heads / items, 1, heads);
  }
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    SequencePlan& sequence = plan.sequences[seq];
    if (sequence.num_parts == 0) continue;
    if (sequence.is_decode) {
      const int64_t rows = padded_rows(sequence.view.query_len * group);
      const int64_t state = 2 * rows * round_up(p.head_dim, kChunk);
      sequence.heads_per_item = std::clamp<int64_t>(kDecodeState / state, 1, heads);
      plan.decode_rows = std::max(plan.decode_rows, rows);
      plan.decode_all_rows = std::max(plan.decode_all_rows, rows * sequence.heads_per_item);
    } else {
      const int64_t rows = std::min(sequence.view.query_len, tokens_per_tile(p)) * group;
      plan.prefill_rows = std::max(plan.prefill_rows, round_up(rows, kStripRows));
    }
    const int64_t head_groups = (p.num_kv_heads + sequence.heads_per_item - 1) / sequence.heads_per_item;
    if (sequence.is_decode && sequence.num_parts > 1) {
      sequence.first_partial = plan.num_partials;
      sequence.first_count = plan.num_counts;
      plan.num_partials += sequence.num_parts * p.num_kv_heads * sequence.view.query_len * group;
      plan.num_counts += head_groups;
    }
    plan.num_items += sequence.num_parts * head_groups;
  }
}

// Long items first, so that threads end together: prefill before decode, and its late tiles, which see most keys,
// first.
void plan_items(const AttentionParams& p, Plan& plan) {
  WorkItem* item = plan.items;
  auto add_heads = [&](int64_t seq, int64_t part, int64_t heads_per_item) {
    for (int64_t head = 0; head < p.num_kv_heads; head += heads_per_item) {
      *item++ = {seq, part, head, std::min(head + heads_per_item, p.num_kv_heads)};
    }
  };
  for (const bool decode : {false, true}) {
    for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
      const SequencePlan& sequence = plan.sequences[seq];
      if (sequence.is_decode != decode) continue;
      for (int64_t i = 0; i < sequence.num_parts; ++i) {
        add_heads(seq, decode ? sequence.first_part + i : sequence.num_parts - 1 - i, sequence.heads_per_item);
      }
    }
  }
}

// Hands out the items. Worker w of W begins with items w, w + W, ..., then helps the next worker with what is left of
// its own: so nobody ends early, equal items are shared out equally, and in call after call a small batch is read by
// the cores that hold it in their caches. With one counter for all, one of two threads often took five of eight items.
struct alignas(Arena::kAlignment) ItemCounter {  // a cache line each
  std::atomic<int64_t> taken{0};
};

// All that the threads share.
template <class P>
struct Job {
  const AttentionParams& params;
  const Plan& plan;
  Workspace workspace;
  char* scratch;  // of all workers
  size_t scratch_size;
  ItemCounter* counters;  // [num_workers]
  int64_t num_workers;
};

template <class P>
struct WorkerScratch {
  DecodeScratch<P> decode;
  PrefillScratch<Fallback<P>> prefill;

  WorkerScratch(Arena& arena, const AttentionParams& p, const Plan& plan)
      : decode(arena, plan.decode_all_rows, plan.decode_rows, round_up(p.head_dim, kChunk)),
        prefill(arena, plan.prefill_rows, plan.prefill_rows == 0 ? 0 : round_up(p.head_dim, kChunk)) {}
};

template <class P>
void work(Job<P>& job, int64_t worker) {
  const AttentionParams& p = job.params;
  Arena arena(job.scratch + worker * job.scratch_size);
  WorkerScratch<P> scratch(arena, p, job.plan);
  int64_t helped = 0;  // workers, this one first, of whose items none is left
  auto claim = [&]() -> PlannedItem {
    for (; helped < job.num_workers; ++helped) {
      const int64_t owner = (worker + helped) % job.num_workers;
      const int64_t i = owner + job.num_workers * job.counters[owner].taken.fetch_add(1, std::memory_order_relaxed);
      if (i >= job.plan.num_items) continue;
      const WorkItem& item = job.plan.items[i];
      return {&job.plan.sequences[item.seq], &item};
    }
    return {};
  };
  for (PlannedItem now = claim(); now.item != nullptr;) {
    if (now.plan->is_decode) {
      PlannedItem next;
      decode_item<P>(p, *now.plan, *now.item, job.workspace, scratch.decode, [&] { return next = claim(); });
      now = next;
    } else {
      prefill_item<Fallback<P>>(p, *now.plan, *now.item, scratch.prefill);
      now = claim();
    }
  }
}

// Memory of one call; where it is little, on the stack, as a small decode takes a twentieth longer with malloc's.
template <size_t kOnStack>
class CallMemory {
 public:
  CallMemory() = default;
  CallMemory(const CallMemory&) = delete;
  ~CallMemory() {
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(stack_, sizeof(stack_));
#endif
    std::free(heap_);
  }

  // `size` bytes, once; null where there are no so many.
  void* allocate(size_t size) {
    if (size <= kOnStack) return stack_;
    return heap_ = std::aligned_alloc(Arena::kAlignment, size);
  }

 private:
  alignas(Arena::kAlignment) char stack_[kOnStack];
  void* heap_ = nullptr;
};

template <class P>
Error run(const AttentionParams& p, const Context& context) {
  constexpr Error kOutOfMemory = "paged_attention: out of memory for its workspace";
  Plan plan;
  Arena plan_size(nullptr);
  plan_size.take<SequencePlan>(p.num_seqs);
  CallMemory<1 << 10> plan_memory;
  void* const sequences = plan_memory.allocate(plan_size.used());
  if (sequences == nullptr) return kOutOfMemory;
  plan.sequences = Arena(sequences).take<SequencePlan>(p.num_seqs);
  plan_sequences(p, context.num_threads, plan);
  if (plan.num_items == 0) return nullptr;

  const int64_t workers = std::min(plan.num_workers, plan.num_items);
  Arena scratch_size(nullptr);
  WorkerScratch<P>(scratch_size, p, plan);
  Workspace workspace{};
  char* scratch = nullptr;
  ItemCounter* counters = nullptr;
  auto lay_out = [&](Arena arena) {
    plan.items = arena.take<WorkItem>(plan.num_items);
    workspace.states = arena.take<SoftmaxState>(plan.num_partials);
    workspace.values = arena.take<float>(plan.num_partials * round_up(p.head_dim, kChunk));
    workspace.counts = arena.take<std::atomic<int32_t>>(plan.num_counts);
    counters = arena.take<ItemCounter>(workers);
    scratch = arena.take<char>(workers * static_cast<int64_t>(scratch_size.used()));
    return arena.used();
  };
  CallMemory<1 << 15> call_memory;
  void* const memory = call_memory.allocate(lay_out(Arena(nullptr)));
  if (memory == nullptr) return kOutOfMemory;
  lay_out(Arena(memory));
  plan_items(p, plan);
  for (int64_t i = 0; i < plan.num_counts; ++i) new (workspace.counts + i) std::atomic<int32_t>(0);
  for (int64_t i = 0; i < workers; ++i) new (counters + i) ItemCounter;

  Job<P> job{p, plan, workspace, scratch, scratch_size.used(), counters, workers};
  if (workers == 1) {
    work(job, 0);
  } else {
    context.parallel_for(
        workers, 1,
        [](void* arg, int64_t begin, int64_t end) {
          for (int64_t worker = begin; worker < end; ++worker) work(*static_cast<Job<P>*>(arg), worker);
        },
        &job);
  }
  return nullptr;
}

// The fastest products on this instruction set for a cache of T, with queries of bfloat16 or of others.
template <class T, bool kBFloat16Queries>
struct ProductsFor {
  using type = FloatProducts<T>;
};
#if PAGED_KV_WIDTH >= 8
template <>
struct ProductsFor<int8_t, true> {
  using type = Int8Products;
};
#endif
#ifdef __AVX512BF16__
template <bool kBFloat16Queries>
struct ProductsFor<BFloat16, kBFloat16Queries> {
  using type = BFloat16Products;
};
template <>
struct ProductsFor<Float8E4M3, false> {
  using type = E4M3FloatProducts;
};
template <>
struct ProductsFor<Float8E4M3, true> {
  using type = ByteProducts<Float8E4M3>;
};
template <>
struct ProductsFor<Float8E5M2, true> {
  using type = ByteProducts<Float8E5M2>;
};
#endif

}  // namespace

Error paged_attention(const AttentionParams& p, const Context& context) {
  return dispatch_cache(p.key_cache.dtype, [&](auto dtype) {
    using T = Element<dtype()>;
    if (p.query.dtype == DType::kBFloat16) return run<typename ProductsFor<T, true>::type>(p, context);
    return run<typename ProductsFor<T, false>::type>(p, context);
  });
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
