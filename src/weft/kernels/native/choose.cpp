#include "choose.h"

#include <string.h>

#include <atomic>

namespace weft {

#ifdef __x86_64__
namespace avx2 { extern const Kernels KERNELS; extern const RowKernels ROW_KERNELS; }
namespace avx512 { extern const Kernels KERNELS; extern const RowKernels ROW_KERNELS; }
#endif
namespace base { extern const Kernels KERNELS; extern const RowKernels ROW_KERNELS; }

namespace {

#ifdef __aarch64__
constexpr const char* BASE = "neon";
#else
constexpr const char* BASE = "base";
#endif

struct Choice { const char* name; const Kernels* kernels; const RowKernels* row_kernels; };

// The best that the processor and the system support comes first.
std::vector<Choice> choices() {
    std::vector<Choice> found;
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
        found.push_back({"avx512", &avx512::KERNELS, &avx512::ROW_KERNELS});
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        found.push_back({"avx2", &avx2::KERNELS, &avx2::ROW_KERNELS});
#endif
    found.push_back({BASE, &base::KERNELS, &base::ROW_KERNELS});
    return found;
}

const std::vector<Choice>& available() {
    static const auto* found = new std::vector<Choice>(choices());
    return *found;
}

std::atomic<const Choice*> chosen{nullptr};

const Choice& choice() {
    const Choice* found = chosen.load();
    return found ? *found : available().front();
}

}  // namespace

const Kernels& kernels() { return *choice().kernels; }

const RowKernels& row_kernels() { return *choice().row_kernels; }

const char* instruction_set() { return choice().name; }

std::vector<const char*> instruction_sets() {
    std::vector<const char*> names;
    for (const Choice& each : available()) names.push_back(each.name);
    return names;
}

bool force_instruction_set(const char* name) {
    for (const Choice& each : available())
        if (!strcmp(each.name, name)) {
            chosen.store(&each);
            return true;
        }
    return false;
}

}  // namespace weft
