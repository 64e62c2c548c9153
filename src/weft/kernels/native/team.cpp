#include "team.h"

#ifndef _WIN32
#include <pthread.h>
#endif
#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace weft {
namespace {

constexpr int LOOKS = 500;  // for work, before a thread sleeps: waking it takes as long as a kernel on 1 MB
constexpr int64_t MOST_THREADS = 64;  // of a call, whatever is asked for

// A thread that is woken may be put behind the thread that woke it, on the same core, beside an idle one. So it is told to
// come up on another core.
class Cores {
public:
#ifdef __linux__
    void remember() {
        thread = (pid_t)syscall(SYS_gettid);  // glibc has had gettid() since 2.30 only
        is_known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    }
    void leave_this_core() {
        int core = sched_getcpu();
        if (!is_known || core < 0 || core >= CPU_SETSIZE) return;
        cpu_set_t others = allowed;
        CPU_CLR(core, &others);
        sched_setaffinity(thread, sizeof others, &others);
    }
    void allow_all() {
        if (is_known) sched_setaffinity(0, sizeof allowed, &allowed);
    }

private:
    pid_t thread = 0;
    cpu_set_t allowed;
    bool is_known = false;
#else
    void remember() {}
    void leave_this_core() {}
    void allow_all() {}
#endif
};

struct Helper {
    std::mutex mutex;
    std::condition_variable condition;
    bool is_asleep = false;
    Cores cores;
};

// The helpers of this process. They wait for work that is open and has a place for them.
class Team {
public:
    explicit Team(int64_t wanted) : wanted(wanted), helpers(new Helper[wanted]) {
        try {
            for (; size < wanted; size++) std::thread(&Team::serve, this, &helpers[size]).detach();
        } catch (const std::exception&) {  // no more threads can be started, or there is no memory: these are enough
        }
    }

    void run(void (*new_work)(void*), void* new_job, int64_t count) {
        work = new_work, job = new_job;
        places.store(count);
        open.store(true);
        for (int64_t i = 0; i < std::min(count, size); i++) wake(helpers[i]);
        new_work(new_job);
        open.store(false);
        while (inside.load() > 0) std::this_thread::yield();
    }

    // Lets the helpers end; the team is not freed, a helper may still look at it.
    void end() {
        is_over.store(true);
        for (int64_t i = 0; i < size; i++) wake(helpers[i]);
    }

    const int64_t wanted;

private:
    void wake(Helper& helper) {
        std::lock_guard<std::mutex> lock(helper.mutex);
        if (!helper.is_asleep) return;
        helper.cores.leave_this_core();
        helper.is_asleep = false;
        helper.condition.notify_one();
    }

    void serve(Helper* self) {
        self->cores.remember();
        int left = LOOKS;
        while (!is_over.load()) {
            if (take_part()) left = LOOKS;
            else if (left-- > 0) std::this_thread::yield();
            else {
                sleep(*self);
                left = LOOKS;
            }
        }
    }

    bool take_part() {
        if (!open.load() || places.load() <= 0) return false;
        inside.fetch_add(1);
        // Work that is open now stays so until nobody is inside.
        bool has_place = open.load() && places.fetch_sub(1) > 0;
        if (has_place) work(job);
        inside.fetch_sub(1);
        return has_place;
    }

    void sleep(Helper& self) {
        std::unique_lock<std::mutex> lock(self.mutex);
        if (is_over.load() || (open.load() && places.load() > 0)) return;
        self.is_asleep = true;
        self.condition.wait(lock, [&] { return !self.is_asleep; });
        lock.unlock();
        self.cores.allow_all();
    }

    std::atomic<bool> open{false}, is_over{false};
    std::atomic<int64_t> places{0}, inside{0};
    void (*work)(void*) = nullptr;
    void* job = nullptr;
    int64_t size = 0;  // threads that were started
    Helper* helpers;
};

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

std::atomic<Team*> team{nullptr};  // made when it is first needed, and never freed: its threads may outlive the module
std::atomic<bool> is_taken{false};
std::atomic<int64_t> limit{1};
std::atomic<Parallel> torch_runner{nullptr};
std::atomic<int (*)()> torch_number{nullptr};

#ifndef _WIN32
// A forked child has none of the threads. Calling torch's would never return.
void after_fork() {
    team.store(nullptr);
    is_taken.store(false);
    torch_runner.store(nullptr);
}

const int registered = pthread_atfork(nullptr, nullptr, after_fork);
#endif

// The team, with at least as many helpers as the limit allows; null if there is no memory for it.
Team* helpers() {
    int64_t wanted = limit.load() - 1;
    Team* found = team.load();
    if (found && found->wanted >= wanted) return found;
    if (found) found->end();
    try {
        found = new Team(wanted);
    } catch (const std::bad_alloc&) {
        found = nullptr;
    }
    team.store(found);
    return found;
}

// Work for the first threads of a team: the same ones from call to call, whose caches may still have the data.
struct Limited {
    void (*work)(void*);
    void* job;
    int64_t threads;
};

void run_limited(void* given) {
    Limited& limited = *(Limited*)given;
    if (torch_number.load()() < limited.threads) limited.work(limited.job);
}

}  // namespace

void yield() { std::this_thread::yield(); }

int64_t& last_share() {
    static thread_local int64_t share = 0;
    return share;
}

void share(void (*work)(void*), void* job, int64_t threads, int64_t torch_threads) {
    threads = std::min(threads, torch_threads > 0 ? std::min(torch_threads, limit.load()) : limit.load());
    if (threads > 1 && !is_taken.exchange(true)) {
        Parallel parallel = torch_threads > 0 ? torch_runner.load() : nullptr;
        if (parallel) {
            // OpenMP keeps a team of the same size from call to call.
            Limited limited = {work, job, threads};
            parallel(run_limited, &limited, (unsigned)torch_threads, 0);
        } else if (Team* some = helpers()) {
            some->run(work, job, threads - 1);
        } else {
            work(job);
        }
        is_taken.store(false);
    } else {
        work(job);
    }
}

int64_t num_threads() { return limit.load(); }

void set_num_threads(int64_t count) { limit.store(std::clamp<int64_t>(count, 1, MOST_THREADS)); }

void set_torch_runner(void* parallel, void* number) {
    torch_number.store((int (*)())number);
    torch_runner.store((Parallel)parallel);
}

}  // namespace weft
