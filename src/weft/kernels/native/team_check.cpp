// Drives team.cpp from many threads; built and run with ThreadSanitizer by .ci/sanitize.
#include <stdio.h>

#include <atomic>
#include <thread>
#include <vector>

#include "team.h"

namespace {

// Adds up numbers that the threads take one by one. The sums are not atomic: the end of `share` must order them.
struct Job {
    std::atomic<int> next{0};
    long sums[1000] = {};
};

void work(void* job) {
    Job& own = *(Job*)job;
    for (int i; (i = own.next.fetch_add(1)) < 1000;)
        for (int k = 0; k <= i; k++) own.sums[i] += k;
}

bool is_right(long threads) {
    Job job;
    weft::share(work, &job, threads, 0);
    for (long i = 0; i < 1000; i++)
        if (job.sums[i] != i * (i + 1) / 2) return false;
    return true;
}

}  // namespace

int main() {
    std::atomic<int> wrong{0};
    for (int size : {4, 2, 7, 1, 4}) {
        weft::set_num_threads(size);
        std::vector<std::thread> callers;
        for (int c = 0; c < 4; c++)
            callers.emplace_back([&] {
                for (int i = 0; i < 200; i++) wrong += !is_right(1 + i % 8);
            });
        for (std::thread& caller : callers) caller.join();
    }
    printf("%d wrong sums\n", wrong.load());
    return wrong.load() != 0;
}
