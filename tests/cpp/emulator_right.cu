// Right kernels: the emulator must compute what a GPU would, in every order, and find nothing to report.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "ffi/cuda/simt.h"
#include "ffi/cuda/upload.h"
#include "tests/cpp/emulator_test.h"

namespace jax_tt {
namespace {

constexpr unsigned kAll = 0xffffffffu;

std::string Expect(const Status& status, bool result) {
  if (!status.ok()) return status.message;
  return result ? "" : "wrong result";
}

// Sums by halves in shared memory, then adds the sums of blocks in the last block to finish.
__global__ void __launch_bounds__(256) SumBlocks(const int* in, int n, int* partial, unsigned* finished, int* out) {
  SharedArena arena;
  Shared<int> sums = arena.Take<int>(blockDim.x);
  Shared<unsigned> last = arena.Take<unsigned>(1);
  int sum = 0;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += gridDim.x * blockDim.x)
    sum += in[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sums[0];
    __threadfence();
    last[0] = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last[0] != 0 && threadIdx.x == 0) {
    for (unsigned b = 0; b < gridDim.x; ++b) *out += partial[b];
  }
}

std::string BlockReduction() {
  std::vector<int> in(10007);
  std::iota(in.begin(), in.end(), 0);
  std::vector<int> partial(7);
  unsigned finished = 0;
  int out = 0;
  const Status status = Launch(nullptr, 7, 256, SharedBytes<int>(256) + SharedBytes<unsigned>(1), SumBlocks, in.data(),
                               10007, partial.data(), &finished, &out);
  return Expect(status, out == 10007 * 10006 / 2);
}

// Inclusive sums: shuffles within warps, shared memory between them.
template <typename T>
__global__ void Scan(const T* in, T* out) {
  SharedArena arena;
  Shared<T> totals = arena.Take<T>(32);
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T value = in[threadIdx.x];
  for (unsigned delta = 1; delta < 32; delta *= 2) {
    const T other = __shfl_up_sync(kAll, value, delta);
    if (lane >= delta) value += other;
  }
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  for (unsigned w = 0; w < warp; ++w) value += totals[w];
  out[threadIdx.x] = value;
}

template <typename T>
std::string ScanCase() {
  std::vector<T> in(512), out(512), expected(512);
  for (int i = 0; i < 512; ++i) in[i] = static_cast<T>(i * 7 % 13);
  std::partial_sum(in.begin(), in.end(), expected.begin());
  const Status status = Launch(nullptr, 1, 512, SharedBytes<T>(32), Scan<T>, in.data(), out.data());
  return Expect(status, out == expected);
}

__global__ void CountDigits(const int* in, int n, int* shared_counts, unsigned* global_counts, unsigned* best) {
  SharedArena arena;
  Shared<int> counts = arena.Take<int>(16);
  if (threadIdx.x < 16) counts[threadIdx.x] = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < n; i += blockDim.x) {
    atomicAdd(counts + in[i], 1);
    atomicAdd(&global_counts[in[i]], 1u);
    atomicMax(best, static_cast<unsigned>(in[i] * 1000 + i % 1000));
  }
  __syncthreads();
  if (threadIdx.x < 16) shared_counts[threadIdx.x] = counts[threadIdx.x];
}

std::string Atomics() {
  std::vector<int> in(3000), shared_counts(16), expected(16);
  std::vector<unsigned> global_counts(16);
  unsigned best = 0;
  for (int i = 0; i < 3000; ++i) ++expected[in[i] = i * i % 16];
  const Status status = Launch(nullptr, 1, 128, SharedBytes<int>(16), CountDigits, in.data(), 3000,
                               shared_counts.data(), global_counts.data(), &best);
  return Expect(status, shared_counts == expected &&
                            std::equal(expected.begin(), expected.end(), global_counts.begin()) && best / 1000 == 9);
}

// Groups of eight lanes pass values round through shared memory, ordered by nothing but their own mask.
__global__ void RotateGroups(int* out, int rounds) {
  SharedArena arena;
  Shared<int> slots = arena.Take<int>(blockDim.x);
  const int lane = static_cast<int>(threadIdx.x % 32), group = lane / 8 * 8;
  const unsigned mask = 0xffu << group;
  Shared<int> mine = slots + (threadIdx.x - lane + group);
  int value = lane % 8;
  for (int i = 0; i < rounds + group; ++i) {
    mine[lane % 8] = value;
    __syncwarp(mask);
    value = mine[(lane + 1) % 8];
    __syncwarp(mask);
  }
  __syncwarp();
  out[threadIdx.x] = value * 100 + slots[threadIdx.x - lane + (lane + 8) % 32];
}

std::string MaskedGroups() {
  std::vector<int> out(64);
  const Status status = Launch(nullptr, 1, 64, SharedBytes<int>(64), RotateGroups, out.data(), 5);
  bool right = true;
  for (int t = 0; t < 64; ++t) {
    const int lane = t % 32, next = (lane + 8) % 32;
    const int rounds = 5 + lane / 8 * 8, next_rounds = 5 + next / 8 * 8;
    right &= out[t] == (lane + rounds) % 8 * 100 + (next + next_rounds - 1) % 8;
  }
  return Expect(status, right);
}

__global__ void Vote(int* out) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool third = lane % 3 == 0;
  bool right = __ballot_sync(kAll, third) == 0x49249249u && __any_sync(kAll, lane == 5) && !__any_sync(kAll, lane > 40);
  right = right && __all_sync(kAll, lane < 32) && !__all_sync(kAll, third);
  right = right && __match_any_sync(kAll, lane / 4) == 0xfu << lane / 4 * 4;
  right = right && __shfl_sync(kAll, lane * 2, 7, 8) == (lane / 8 * 8 + 7) * 2;
  right = right && __shfl_xor_sync(kAll, lane, 5) == (lane ^ 5);
  right = right && __shfl_down_sync(kAll, lane, 3u) == (lane + 3 < 32 ? lane + 3 : lane);
  right = right && __shfl_up_sync(kAll, 0.5 * lane, 3u, 16) == 0.5 * (lane % 16 < 3 ? lane : lane - 3);
  if (lane < 10) right = right && __ballot_sync(0x3ffu, lane != 4) == 0x3efu;
  const int thread = static_cast<int>(threadIdx.x);
  right = right && __syncthreads_count(thread % 2) == 32 && __syncthreads_or(thread == 63) == 1;
  right = right && __syncthreads_and(thread < 64) == 1 && __syncthreads_and(thread < 63) == 0;
  out[threadIdx.x] = right;
}

std::string Votes() {
  std::vector<int> out(64);
  const Status status = Launch(nullptr, 1, 64, 0, Vote, out.data());
  return Expect(status, std::count(out.begin(), out.end(), 1) == 64);
}

__global__ void ReverseQuads(const float* in, float* out) {
  SharedArena arena;
  arena.Take<float>(0);  // starts where the next one does
  Shared<float> quads = arena.Take<float>(4 * blockDim.x);
  Store4(quads + 4 * threadIdx.x, Load4(in + 4 * threadIdx.x));
  __syncthreads();
  const float4 other = Load4(quads + 4 * (blockDim.x - 1 - threadIdx.x));
  Store4(out + 4 * threadIdx.x, make_float4(other.w, other.z, other.y, other.x));
}

std::string Vectors() {
  alignas(16) float in[256], out[256];
  std::iota(in, in + 256, 0.0f);
  const Status status = Launch(nullptr, 1, 64, SharedBytes<float>(256), ReverseQuads, in, out);
  return Expect(status, std::equal(in, in + 256, std::reverse_iterator<float*>(out + 256)));
}

__global__ void Fill(int* out, int value) { out[blockIdx.x * blockDim.x + threadIdx.x] = value; }

std::string Limits() {
  std::vector<int> out(4096);
  const Status empty = Launch(nullptr, 0, 32, 0, Fill, out.data(), 1);
  const Status full = Launch(nullptr, 4, 1024, 227 * 1024, Fill, out.data(), 2);
  return Expect(empty.ok() ? full : empty, std::count(out.begin(), out.end(), 2) == 4096);
}

__global__ void Arrive(unsigned* ticket, int* order) {
  order[atomicAdd(ticket, 1u)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  __syncthreads();
  order[atomicAdd(ticket, 1u)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

// Seed 0 is the natural order and every other seed one of its own, the same each time.
std::string Orders() {
  static std::vector<std::vector<int>> seen;
  std::vector<int> order(512), again(512);
  unsigned ticket = 0;
  const Status first = Launch(nullptr, 4, 64, 0, Arrive, &ticket, order.data());
  ticket = 0;
  const Status second = Launch(nullptr, 4, 64, 0, Arrive, &ticket, again.data());
  std::vector<int> natural(64);
  std::iota(natural.begin(), natural.end(), 0);
  const bool is_natural = std::equal(natural.begin(), natural.end(), order.begin());
  const bool right =
      order == again && is_natural == seen.empty() && std::find(seen.begin(), seen.end(), order) == seen.end();
  seen.push_back(order);
  return Expect(first.ok() ? second : first, right);
}

// Words of which some are zero, in one piece of either size and in several, each in the middle of a run at the end.
std::string UploadedWords() {
  for (const unsigned share : {0u, 1u, 3u})  // of 3, that are not zero
    for (const int count : {1, 33, 3000, 30001}) {
      std::vector<uint32_t> from(static_cast<size_t>(count)), to(from.size() + 1, 7);
      for (uint32_t i = 0; i < from.size(); ++i) from[i] = i * 2654435761u >> 16 < share * 21846 ? i + 1 : 0;
      const Status status = Upload(nullptr, from.data(), count, to.data());
      from.push_back(7);
      if (const std::string trouble = Expect(status, from == to); !trouble.empty()) return trouble;
    }
  return "";
}

}  // namespace

const EmulatorCase kRightCases[] = {
    {"block_reduction", BlockReduction},
    {"scan_int", ScanCase<int>},
    {"scan_float", ScanCase<float>},
    {"scan_int64", ScanCase<long long>},
    {"atomics", Atomics},
    {"masked_groups", MaskedGroups},
    {"votes", Votes},
    {"vectors", Vectors},
    {"uploaded_words", UploadedWords},
    {"limits", Limits},
    {"orders", Orders},
};
const int kNumRightCases = sizeof(kRightCases) / sizeof(kRightCases[0]);

}  // namespace jax_tt
