// Drives team.cpp from many threads, and with a team like torch's; built and run with ThreadSanitizer by .ci/sanitize.
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

// As OpenMP does it.
thread_local int number = 0;

int number_of_thread() { return number; }

void parallel(void (*work)(void*), void* job, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++)
        others.emplace_back([=] {
            number = (int)i;
            work(job);
        });
    work(job);
    for (std::thread& other : others) other.join();
}

// Whether `share` lets at most `threads` of a larger team of torch work.
bool keeps_to_the_limit(long threads) {
    std::atomic<long> came{0};
    weft::share([](void* job) { (*(std::atomic<long>*)job)++; }, &came, threads, 6);
    return came.load() <= threads;
}

int main() {
    std::atomic<int> wrong{0};
    weft::set_num_threads(3);
    weft::set_torch_runner((void*)parallel, (void*)number_of_thread);
    for (int i = 0; i < 100; i++) wrong += !keeps_to_the_limit(1 + i % 3);
    for (int size : {4, 2, 7, 1, 4}) {
        weft::set_num_threads(size);
        std::vector<std::thread> callers;
        for (int c = 0; c < 4; c++)
            callers.emplace_back([&] {
                for (int i = 0; i < 200; i++) wrong += !is_right(1 + i % 8);
            });
        for (std::thread& caller : callers) caller.join();
    }
    weft::set_num_threads(1L << 40);
    wrong += weft::num_threads() > 4096;
    printf("%d wrong\n", wrong.load());
    return wrong.load() != 0;
}
