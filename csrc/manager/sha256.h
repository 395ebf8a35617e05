// SHA-256 (FIPS 180-4) over a chain of blocks, as the prefix cache names them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paged_kv::manager {

constexpr size_t DIGEST_BYTES = 32;

// digests[i] = sha256(digests[i - 1], or parent | block i), for `count` blocks of `block_bytes` one behind the other.
// With `accelerated`, by the processor's own SHA instructions where it has them.
void hash_chain(const uint8_t* parent, const uint8_t* blocks, size_t block_bytes, size_t count, bool accelerated,
                uint8_t* digests);

}  // namespace paged_kv::manager
