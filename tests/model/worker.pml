/* How workers share jobs: a model that Spin checks for all interleavings and all placements of a few faults.
 *
 * To read it, you need to know four things about Promela:
 *   - A `proctype` is a process. Spin tries every order of the steps of all processes.
 *   - `atomic { … }` is one step. Here, an atomic block that contains a call to a script is the script and its reply.
 *   - `if :: guard -> … :: guard -> … fi` takes any branch whose guard is true: Spin tries each of them.
 *   - `inline` is a macro: its result is in a global variable.
 *
 * Two workers share one queue. Worker 0's child prefetches; worker 1's child acquires one job at a time. Each worker
 * has a supervisor. A worker that was stopped with SIGSTOP and continues needs no code: Spin delays any process for as
 * long as it likes, and the process `Faults` expires its locks meanwhile.
 *
 * Left out: the order of the waiting jobs (a fetch takes any of them), delays, priorities, flows, several queues,
 * async tasks, time limits, shutdown, outcomes that are too large for a slot, error replies, retention, and the
 * contents of jobs. Time is left out, except that a lock does not expire between the two steps of one heartbeat.
 */

#ifndef JOBS
#define JOBS 2           /* job 0 may be the poison pill */
#endif
#ifndef SLOTS
#define SLOTS 2          /* slots of worker 0's child, so it prefetches SLOTS - 1 jobs */
#endif
#ifndef CHILD_KILLS
#define CHILD_KILLS 0    /* how many children are killed, apart from those that the poison pill crashes */
#endif
#ifndef WORKER_KILLS
#define WORKER_KILLS 0   /* how many supervisors are killed; the kernel then kills their children */
#endif
#ifndef EXPIRIES
#define EXPIRIES 0       /* how many locks of live workers expire: outages, stopped workers */
#endif
#ifndef LOST_REPLIES
#define LOST_REPLIES 0   /* how many calls get no reply; Redis may have executed them */
#endif
#ifndef RETRIES
#define RETRIES 0        /* how many attempts fail and are retried */
#endif
#ifndef POISON
#define POISON 0         /* 1: the task of job 0 always crashes its child */
#endif

#define MAX_CRASHES 2    /* max_crashes */
#define MAX_STALLED 1    /* max_stalled_count */

/* ---- properties ----
 * `require(name, condition)` checks a property at one point. The names are variables that are always false, because
 * Spin prints the expression of an assertion that fails. README.md explains the properties.
 */
bool one_place, one_outcome, one_owner, lock_only_active, reacquired_by_holder, stall_grace, single_run,
    starts_counted, crash_counted_once, crash_limit, prefetch_is_free;
#define require(property, condition) if :: (condition) :: else -> assert(property) fi
#ifdef TAKEOVER_WITHOUT_LOCK  /* this variant also violates starts_counted, a step earlier */
#define require_start(condition) skip
#else
#define require_start(condition) require(starts_counted, condition)
#endif

/* ---- Redis ---- */

#define NONE 7           /* no job */
bool in_wait[JOBS] = true, in_active[JOBS], in_completed[JOBS], in_failed[JOBS];
byte lock[JOBS];         /* the token in the job's lock; 0: the job has no lock */
bool marked[JOBS];       /* the `stalled` set */
byte stalls[JOBS];       /* stc */
bool deferred_failure[JOBS];  /* defa: the next worker fails the job instead of running it */
byte attempts_made[JOBS];     /* atm */
byte crashes[JOBS];      /* bulltask:crashes */
byte crash_token[JOBS];  /* the newest token in the set of tokens that counts crashes */

/* Facts that no program knows, for the properties. */
byte deaths[JOBS];       /* how many children died while they were running or acquiring the job */
byte unstarted[JOBS];    /* the starts counted in the job (ats) that were not starts of its task */
bool checked[JOBS];      /* a stalled check has run since the lock was last acquired or renewed */
byte faults;             /* faults so far */
byte newest;             /* how many jobs were ever acquired: without a poison pill, new jobs are interchangeable */
bool has_expired;        /* a live worker's lock has expired */
byte child_kills = CHILD_KILLS, worker_kills = WORKER_KILLS, expiries = EXPIRIES, lost_replies = LOST_REPLIES,
    retries = RETRIES;

/* ---- workers ---- */

#define ALL_SLOTS (SLOTS + 1)
#define FIRST(w) (w * SLOTS)
#define END(w) (SLOTS + w)
#define WORKER(s) (s / SLOTS)

/* SlotState in worker/slots.py */
#define FREE 0
#define RESERVED 1
#define ACTIVE 2
#define FINISHING 3
#define PREFETCHED 4
#define ENDED 5
#define WRITTEN 6
#define NO_REPLY 7
#define RELEASING 8
#define RELEASED 9

/* outcomes */
#define COMPLETE 1
#define RETRY 2
#define FAIL 3

/* The slots, in memory that the child and its supervisor share (worker/slots.py). */
byte state[ALL_SLOTS];
byte job[ALL_SLOTS] = NONE;
byte outcome[ALL_SLOTS];

/* What only the child knows. */
byte reply[ALL_SLOTS] = NONE;     /* the job in a reply that the child has not read yet */
byte seen_attempts[ALL_SLOTS];    /* attempts_made when the job was acquired */
bool without_reply[ALL_SLOTS];        /* SlotPool.without_reply: a call without a reply may have locked a job */
bool write_lost[ALL_SLOTS];       /* write_again: a write of the outcome got no reply */
byte written[ALL_SLOTS];          /* the call that writes the outcome: SENT, or its reply (OK, REJECTED, LOST) */

byte holds[ALL_SLOTS] = NONE;     /* fact: the job that Redis gave this token, until the token gives it back */

#define IDLE 0           /* JobFetcher.acquire */
#define FETCHED 2        /* the reply is not read yet */
#define CHOOSING 3       /* PrefetchLoop._run_ready, between two jobs */
#define RUNNING 4        /* the task's code is running, and the block is unlocked */
#define ENDED 5          /* the task's code has ended, and the child waits for the block's lock */
#define WRITING 6        /* PrefetchLoop._write */
#define WROTE 7          /* the child is reading the reply to a write */
#define DEAD 8           /* the supervisor has not recovered its jobs yet */
byte phase[2];
byte current[2];         /* the slot whose job is running, or whose outcome is being written */

/* The lock of the child's block (ChildBlock.lock) */
#define BY_NOBODY 0
#define BY_CHILD 1
#define BY_SUPERVISOR 2
byte block[2] = BY_CHILD;

bool killed[2];          /* the supervisor was killed, and its replacement has not started yet */
byte generation[2];      /* counts the children of a worker, so that each has other tokens */
byte beating[2] = NONE;  /* the job whose lock a heartbeat is renewing */

#define TOKEN(s) (1 + s + ALL_SLOTS * generation[WORKER(s)])
#define OWNER_IS_DEAD(token) (generation[WORKER((token - 1) % ALL_SLOTS)] != (token - 1) / ALL_SLOTS)

/* ---- one call to Redis ---- */

#define REPLIED 0
#define EXECUTED 1       /* Redis executed the call, but the reply is lost */
#define NOT_EXECUTED 2
byte call, result, j, k = NONE, s;
#define OK 1
#define REJECTED 2
#define LOST 3
#define SENT 4           /* Redis has not executed the call yet; meanwhile, the child may run another job */

/* These variables are used only within a step. */
inline end_step() { call = REPLIED; result = 0; j = 0; k = NONE; s = 0 }

inline any_call() {
    if
    :: call = REPLIED
    :: lost_replies > 0 -> lost_replies--; faults++; call = EXECUTED
    :: lost_replies > 0 -> lost_replies--; faults++; call = NOT_EXECUTED
    fi
}

/* ---- scripts ---- */

/* moveToActive; also the end of moveToFinished. k = the job; the list's order is left out. */
inline move_to_active(slot) {
    if
    :: in_wait[0] -> k = 0
    :: in_wait[1] && (POISON || newest > 0) -> k = 1
#if JOBS > 2
    :: in_wait[2] && (POISON || newest > 1) -> k = 2
#endif
    :: else -> k = NONE
    fi;
    if
    :: k != NONE ->
        newest = (k + 1 > newest -> k + 1 : newest);
        in_wait[k] = false; in_active[k] = true; lock[k] = TOKEN(slot);
        unstarted[k]++; checked[k] = false; holds[slot] = k
    :: else
    fi
}

#if defined(FINISH_WITHOUT_TOKEN) || defined(FINISH_UNCHECKED)
#define HAS_LOCK(id, token) true
#else
#define HAS_LOCK(id, token) (lock[id] == token)
#endif
#ifdef FINISH_UNCHECKED
#define IS_ACTIVE(id) true
#else
#define IS_ACTIVE(id) in_active[id]
#endif

/* moveToFinished, or retryJob, without the fetch that may follow. result = OK or REJECTED */
inline move_to_finished(slot, id, what) {
    result = REJECTED;
    if
    :: HAS_LOCK(id, TOKEN(slot)) && IS_ACTIVE(id) ->
#ifndef FINISH_UNCHECKED
        require(one_owner, lock[id] == TOKEN(slot) || lock[id] == 0);
#endif
        if :: what != RETRY -> require(one_outcome, !in_completed[id] && !in_failed[id]) :: else fi;
        lock[id] = 0; marked[id] = false; in_active[id] = false; attempts_made[id]++;
        in_completed[id] = in_completed[id] || what == COMPLETE;
        in_failed[id] = in_failed[id] || what == FAIL;
        in_wait[id] = in_wait[id] || what == RETRY;
        if :: holds[slot] == id -> holds[slot] = NONE :: else fi;
        result = OK
    :: else
    fi
}

/* The call in a slot: writes the outcome, and fetches the next job if the child prefetches. k = that job */
inline write_and_fetch(slot, fetches) {
    k = NONE;
    move_to_finished(slot, job[slot], outcome[slot]);
    if
    :: result == OK && outcome[slot] != RETRY && (fetches) -> move_to_active(slot)
    :: else
    fi
}

/* moveJobFromActiveToWait */
inline move_from_active_to_wait(slot, id) {
    if
    :: lock[id] == TOKEN(slot) && in_active[id] ->
        lock[id] = 0; marked[id] = false; in_active[id] = false;
#ifdef RELEASE_IN_TWO_CALLS
        in_wait[id] = call == REPLIED;  /* otherwise, the connection breaks between the calls */
#else
        in_wait[id] = true;
#endif
        if :: holds[slot] == id -> holds[slot] = NONE :: else fi
    :: else
    fi
}

/* releaseUnstarted: the same, and subtracts the start that moveToActive has counted. */
inline release_unstarted(slot, id) {
    if
    :: lock[id] == TOKEN(slot) && in_active[id] ->
        require_start(unstarted[id] > 0);
#ifndef RELEASE_KEEPS_START
        unstarted[id] = (unstarted[id] > 0 -> unstarted[id] - 1 : 0);
#endif
        move_from_active_to_wait(slot, id)
    :: else
    fi
}

/* renewLocks, for one job. result = OK or REJECTED */
inline renew_lock(slot, id) {
    result = REJECTED;
    if
    :: lock[id] == TOKEN(slot) -> result = OK
#ifdef REACQUIRE_FINISHED
    :: lock[id] == 0 ->
#else
    :: lock[id] == 0 && in_active[id] ->
#endif
        require(lock_only_active, in_active[id]);
        require(reacquired_by_holder, holds[slot] == id);
        lock[id] = TOKEN(slot);
        result = OK
    :: else
    fi;
    if
    :: result == OK ->
        checked[id] = false;
#ifndef RENEW_KEEPS_MARK
        marked[id] = false
#endif
    :: else
    fi
}

/* findByToken: k = the active job that is locked with the slot's token */
inline find_by_token(slot) {
    k = NONE;
    if :: in_active[0] && lock[0] == TOKEN(slot) -> k = 0 :: else fi;
    if :: in_active[1] && lock[1] == TOKEN(slot) -> k = 1 :: else fi;
#if JOBS > 2
    if :: in_active[2] && lock[2] == TOKEN(slot) -> k = 2 :: else fi
#endif
}

#ifdef ONE_PASS
#define MAY_HAVE_STALLED(id) true
#else
#define MAY_HAVE_STALLED(id) marked[id]
#endif

/* moveStalledJobsToWait */
inline move_stalled_jobs_to_wait() {
    for (j : 0 .. JOBS - 1) {
        if
        :: MAY_HAVE_STALLED(j) && in_active[j] && lock[j] == 0 ->
            require(stall_grace, checked[j]);
            in_active[j] = false; in_wait[j] = true; stalls[j]++;
            deferred_failure[j] = stalls[j] > MAX_STALLED
        :: else
        fi;
        marked[j] = in_active[j];
        checked[j] = in_active[j]
    }
}

/* ---- the child ---- */

#define PREFETCHES(w) (w == 0 && SLOTS > 1)

#if SLOTS > 1
#define COUNT_IN(w, x) ((state[FIRST(w)] == x) + (w == 0 && state[1] == x) SLOT_2(w, x))
#else
#define COUNT_IN(w, x) ((state[FIRST(w)] == x) SLOT_2(w, x))
#endif
#if SLOTS > 2
#define SLOT_2(w, x) + (w == 0 && state[2] == x)
#else
#define SLOT_2(w, x)
#endif
#if JOBS > 2
#define SOME_JOB_WAITS (in_wait[0] || in_wait[1] || in_wait[2])
#else
#define SOME_JOB_WAITS (in_wait[0] || in_wait[1])
#endif
#if SLOTS > 2
#define HAS_NO_REPLY(w) (without_reply[FIRST(w)] || (w == 0 && (without_reply[1] || without_reply[2])))
#elif SLOTS > 1
#define HAS_NO_REPLY(w) (without_reply[FIRST(w)] || (w == 0 && without_reply[1]))
#else
#define HAS_NO_REPLY(w) without_reply[FIRST(w)]
#endif

/* The child has sent calls and not read their replies. */
#if SLOTS > 2
#define HAS_SENT(w) (written[FIRST(w)] != 0 || (w == 0 && (written[1] != 0 || written[2] != 0)))
#elif SLOTS > 1
#define HAS_SENT(w) (written[FIRST(w)] != 0 || (w == 0 && written[1] != 0))
#else
#define HAS_SENT(w) (written[FIRST(w)] != 0)
#endif

/* Redis has not executed all of them. */
#if SLOTS > 2
#define IS_SENT(w) (written[FIRST(w)] == SENT || (w == 0 && (written[1] == SENT || written[2] == SENT)))
#elif SLOTS > 1
#define IS_SENT(w) (written[FIRST(w)] == SENT || (w == 0 && written[1] == SENT))
#else
#define IS_SENT(w) (written[FIRST(w)] == SENT)
#endif

inline forget(slot) {
    state[slot] = FREE; job[slot] = NONE; outcome[slot] = 0; reply[slot] = NONE;
    seen_attempts[slot] = 0; without_reply[slot] = false; write_lost[slot] = false; written[slot] = 0
}

/* SlotPool.clear */
inline free_slot(slot) {
    state[slot] = (without_reply[slot] -> RESERVED : FREE);
    job[slot] = NONE; outcome[slot] = 0; reply[slot] = NONE; seen_attempts[slot] = 0; write_lost[slot] = false;
    written[slot] = 0
}

/* JobFetcher.acquired, with the state PREFETCHED */
inline acquired(slot, id) {
    state[slot] = PREFETCHED; job[slot] = id; outcome[slot] = 0; reply[slot] = NONE;
    seen_attempts[slot] = attempts_made[id]; write_lost[slot] = false; written[slot] = 0
}

/* Redis executes a call that the child has sent. */
inline execute_sent(w, slot) {
    any_call();
    if
    :: call != NOT_EXECUTED -> write_and_fetch(slot, PREFETCHES(w) && !HAS_NO_REPLY(w))
    :: else -> k = NONE; result = LOST
    fi;
    if :: call == REPLIED -> reply[slot] = k :: else -> result = LOST fi;
    written[slot] = result
}

/* The child no longer reads the replies to the calls that it has sent; Redis executes them now, or never. */
inline drop_sent(w) {
    for (s : FIRST(w) .. END(w) - 1) {
        if
        :: written[s] == SENT -> if :: write_and_fetch(s, PREFETCHES(w) && !HAS_NO_REPLY(w)) :: skip fi
        :: else
        fi;
        written[s] = 0
    }
}

/* The child dies. Its slots remain as they are. */
inline die(w) {
    drop_sent(w);
    for (s : FIRST(w) .. END(w) - 1) {
        k = NONE;
        if
        :: state[s] == ACTIVE -> k = job[s]
        :: state[s] == RESERVED || (state[s] == FINISHING && outcome[s] == 0) -> find_by_token(s)
        :: else
        fi;
        if
        :: k != NONE ->
            deaths[k]++;
            require(crash_limit, deaths[k] <= MAX_CRASHES + stalls[k] + faults)
        :: else
        fi;
        reply[s] = NONE; seen_attempts[s] = 0; without_reply[s] = false; write_lost[s] = false
    };
    phase[w] = DEAD; current[w] = 0;
    if :: block[w] == BY_CHILD -> block[w] = BY_NOBODY :: else fi  /* the kernel releases the lock */
}

#ifdef START_RELEASED
#define MAY_START_FETCHED(slot) (reply[slot] != NONE)
#else
#define MAY_START_FETCHED(slot) (reply[slot] != NONE && state[slot] != RELEASED)
#endif

/* A quarantined job runs alone (worker/broker_backoff.py). */
#define MAY_START(w, slot) (state[slot] == PREFETCHED \
    && (crashes[job[slot]] == 0 || (COUNT_IN(w, PREFETCHED) + COUNT_IN(w, ENDED) == 1 && !HAS_SENT(w))))

inline start(w, slot) {
    if
    :: deferred_failure[job[slot]] ->  /* fails without running */
        outcome[slot] = FAIL; state[slot] = ENDED
    :: else ->
        require(single_run, has_expired || !(
            (phase[1 - w] == RUNNING || phase[1 - w] == ENDED) && job[current[1 - w]] == job[slot]));
        require_start(has_expired || unstarted[job[slot]] > 0);
        if :: unstarted[job[slot]] > 0 -> unstarted[job[slot]]-- :: else fi;
        state[slot] = ACTIVE; current[w] = slot; phase[w] = RUNNING; block[w] = BY_NOBODY
    fi
}

proctype Child(byte w) {
    do
    /* JobFetcher.acquire: first release the jobs of calls without replies (FetchesWithoutReply.release_jobs) … */
    :: atomic { !killed[w] && phase[w] == IDLE && HAS_NO_REPLY(w) ->
        any_call();
        for (s : FIRST(w) .. END(w) - 1) {
            if
            :: without_reply[s] ->
                if
                :: call != NOT_EXECUTED ->
                    find_by_token(s);
                    if :: k != NONE -> move_from_active_to_wait(s, k) :: else fi
                :: else
                fi;
                if :: call == REPLIED -> forget(s) :: else fi
            :: else
            fi
        };
        end_step()
       }
    /* … then fetch. The slots are reserved before the call; nothing can happen in between that matters. */
    :: atomic { !killed[w] && phase[w] == IDLE && !HAS_NO_REPLY(w) && SOME_JOB_WAITS ->
        any_call();
        for (s : FIRST(w) .. END(w) - 1) {
            k = NONE;
            state[s] = RESERVED;
            if :: call != NOT_EXECUTED -> move_to_active(s) :: else fi;
            if
            :: call == REPLIED -> reply[s] = k
            :: else -> without_reply[s] = true  /* record_lost_call */
            fi
        };
        phase[w] = (call == REPLIED -> FETCHED : IDLE);
        end_step()
       }
    :: atomic { !killed[w] && phase[w] == FETCHED ->
        for (s : FIRST(w) .. END(w) - 1) {
            if
            :: state[s] == RESERVED && reply[s] != NONE -> k = reply[s]; acquired(s, k)
            :: state[s] == RESERVED && reply[s] == NONE -> forget(s)
            :: else
            fi
        };
        phase[w] = CHOOSING;
        end_step()
       }

    /* PrefetchLoop._run_ready. The child has the block's lock. */
    :: atomic { !killed[w] && phase[w] == CHOOSING && COUNT_IN(w, RELEASING) > 0 && !HAS_SENT(w) ->  /* PrefetchLoop._give_back */
        for (s : FIRST(w) .. END(w) - 1) {
            if :: state[s] == RELEASING -> without_reply[s] = true; free_slot(s) :: else fi
        };
        end_step()
       }
    :: atomic { !killed[w] && phase[w] == CHOOSING && MAY_START(w, FIRST(w)) ->
        start(w, FIRST(w))
       }
#if SLOTS > 1
    :: atomic { !killed[w] && phase[w] == CHOOSING && w == 0 && MAY_START(w, 1) ->
        start(w, 1)
       }
#endif
#if SLOTS > 2
    :: atomic { !killed[w] && phase[w] == CHOOSING && w == 0 && MAY_START(w, 2) ->
        start(w, 2)
       }
#endif
    /* The child may release jobs before it starts them (_release_ready), so that a quarantined one can run alone. */
    :: atomic { !killed[w] && phase[w] == CHOOSING && COUNT_IN(w, PREFETCHED) > 1 && COUNT_IN(w, ENDED) == 0 &&
            !HAS_SENT(w) ->
        s = FIRST(w);
        do :: state[s] != PREFETCHED -> s++ :: else -> break od;
        any_call();
        if :: call != NOT_EXECUTED -> k = job[s]; release_unstarted(s, k) :: else fi;
        without_reply[s] = without_reply[s] || call != REPLIED;
        free_slot(s);
        end_step()
       }
    :: atomic { !killed[w] && phase[w] == CHOOSING && COUNT_IN(w, RELEASING) == 0 && !HAS_SENT(w) &&
            COUNT_IN(w, ENDED) + COUNT_IN(w, WRITTEN) + COUNT_IN(w, NO_REPLY) > 0 ->
        for (s : FIRST(w) .. END(w) - 1) {
            if
            :: state[s] == ENDED -> state[s] = FINISHING
            :: state[s] == NO_REPLY -> state[s] = FINISHING; write_lost[s] = true; without_reply[s] = true
            :: state[s] == WRITTEN -> free_slot(s)
            :: else
            fi
        };
        phase[w] = (COUNT_IN(w, FINISHING) > 0 -> WRITING : CHOOSING);
        end_step()
       }
    :: atomic { !killed[w] && phase[w] == CHOOSING &&
            COUNT_IN(w, PREFETCHED) + COUNT_IN(w, ENDED) + COUNT_IN(w, WRITTEN) +
            COUNT_IN(w, NO_REPLY) + COUNT_IN(w, RELEASING) == 0 && !HAS_SENT(w) ->
        phase[w] = IDLE;
        end_step()
       }

    /* PrefetchLoop._outcome: the task ends; the child waits for the block's lock, and stores the outcome. */
    :: atomic { !killed[w] && phase[w] == RUNNING && POISON && job[current[w]] == 0 ->
        die(w);
        end_step()
       }
    :: atomic { !killed[w] && phase[w] == RUNNING && block[w] == BY_SUPERVISOR && !(POISON && job[current[w]] == 0) ->
        phase[w] = ENDED
       }
    :: atomic { !killed[w] && (phase[w] == RUNNING || phase[w] == ENDED) && block[w] == BY_NOBODY &&
            !(POISON && job[current[w]] == 0) ->
        block[w] = BY_CHILD;
        if
        :: outcome[current[w]] = COMPLETE
        :: retries > 0 -> retries--; outcome[current[w]] = RETRY
        fi;
        state[current[w]] = ENDED; current[w] = 0; phase[w] = CHOOSING
       }

    /* PrefetchLoop._write: write the outcomes, and fetch the next jobs with the same calls. */
    :: atomic { !killed[w] && phase[w] == WRITING ->
        s = FIRST(w);
        do :: state[s] != FINISHING -> s++ :: else -> break od;
        if
        :: execute_sent(w, s); current[w] = s; phase[w] = WROTE
        /* Do not wait for the reply, but run the next job; only of the first write, because a retry waits. */
        :: PREFETCHES(w) && COUNT_IN(w, PREFETCHED) > 0 && !write_lost[s] ->
            for (s : FIRST(w) .. END(w) - 1) { if :: state[s] == FINISHING -> written[s] = SENT :: else fi };
            phase[w] = CHOOSING
        fi;
        end_step()
       }
    /* Redis executes a call that was sent; nobody has to wait for it. */
    :: atomic { !killed[w] && IS_SENT(w) ->
        s = FIRST(w);
        do :: written[s] != SENT -> s++ :: else -> break od;
        execute_sent(w, s);
        end_step()
       }
    /* PrefetchLoop._read_replies, when no job can be started, or the one that was started has ended */
    :: atomic { !killed[w] && phase[w] == CHOOSING && HAS_SENT(w) && !IS_SENT(w) ->
        s = FIRST(w);
        do :: written[s] == 0 -> s++ :: else -> break od;
        current[w] = s; phase[w] = WROTE;
        end_step()
       }
    /* PrefetchLoop._handle_reply, FailedWriteHandler.steps */
    :: atomic { !killed[w] && phase[w] == WROTE ->
        s = current[w];
        if :: state[s] == NO_REPLY && written[s] == REJECTED -> written[s] = LOST :: else fi;
        if
        :: state[s] == WRITTEN -> free_slot(s)
        :: state[s] == RELEASING -> without_reply[s] = true; free_slot(s)
        :: state[s] == FINISHING || state[s] == NO_REPLY || state[s] == RELEASED ->
            if
            :: written[s] == OK && MAY_START_FETCHED(s) -> k = reply[s]; acquired(s, k)
            :: written[s] == OK && !MAY_START_FETCHED(s) -> free_slot(s)
            :: written[s] == LOST -> state[s] = FINISHING; write_lost[s] = true; without_reply[s] = true  /* writes it again */
            :: written[s] == REJECTED ->
                if
                :: write_lost[s] && attempts_made[job[s]] > seen_attempts[s] -> free_slot(s)  /* already_applied */
                :: else ->
                    renew_lock(s, job[s]);  /* reacquire_lock; if that works, the child writes the outcome again */
                    if :: result == REJECTED -> free_slot(s) :: else -> state[s] = FINISHING fi
                fi
            fi
        fi;
        written[s] = 0; current[w] = 0;
        phase[w] = (!HAS_SENT(w) && COUNT_IN(w, FINISHING) > 0 -> WRITING : CHOOSING);
        end_step()
       }
    od
}

/* ---- the supervisor: one loop, whose services run one after another ---- */

#ifdef RENEW_RELEASED_SLOTS
#define HAS_JOB(slot) (state[slot] != FREE && state[slot] != RESERVED)
#else
#define HAS_JOB(slot) (state[slot] != FREE && state[slot] != RESERVED \
    && state[slot] != WRITTEN && state[slot] != RELEASING && state[slot] != RELEASED)
#endif

/* A heartbeat that changes nothing is left out. */
#define NEEDS_HEARTBEAT(slot) (job[slot] != NONE -> \
    marked[job[slot]] || lock[job[slot]] != TOKEN(slot) : \
    (marked[0] && lock[0] == TOKEN(slot)) || (marked[1] && lock[1] == TOKEN(slot)))

/* Heartbeat.tick, for one slot: read it, then renew its lock. The slot may change in between. */
inline heartbeat(w, slot) {
    atomic {
        WORKER(slot) == w && phase[w] != DEAD && state[slot] != FREE && NEEDS_HEARTBEAT(slot) ->
        beating[w] = (HAS_JOB(slot) -> job[slot] : NONE)
    };
    atomic {
        find_by_token(slot);  /* the job of a call whose reply the child has not read */
        if :: k != NONE -> renew_lock(slot, k) :: else fi;
        if :: beating[w] != NONE -> renew_lock(slot, beating[w]) :: else fi;
        beating[w] = NONE;
        end_step()
    }
}

#ifdef PREFETCHED_COUNTS_CRASH
#define MAY_HAVE_CRASHED(slot, id) true
#else
/* JobsOfDeadChild.may_have_crashed */
#define MAY_HAVE_CRASHED(slot, id) (state[slot] != PREFETCHED && state[slot] != RELEASING && outcome[slot] == 0 \
    && (state[slot] == RESERVED || job[slot] == id))
#endif
#ifdef COUNT_CRASHES_WITHOUT_TOKEN
#define IS_COUNTED(slot, id) false
#else
#define IS_COUNTED(slot, id) (crash_token[id] == TOKEN(slot))
#endif
#ifdef NO_CRASH_LIMIT
#define IS_LAST_CRASH(slot, id) false
#else
/* quarantine.should_fail; the limit of a job that was being acquired is not reached here */
#define IS_LAST_CRASH(slot, id) (state[slot] == ACTIVE && crashes[id] >= MAX_CRASHES)
#endif
#define HAS_ENDED(slot) (outcome[slot] != 0 \
    && (state[slot] == ENDED || state[slot] == FINISHING || state[slot] == NO_REPLY))

inline start_child(w) {
    for (s : FIRST(w) .. END(w) - 1) { forget(s); holds[s] = NONE };
    phase[w] = IDLE; block[w] = BY_CHILD; current[w] = 0;
    generation[w] = (generation[w] + 1) % 16
}

/* Recovery: finishes the jobs of a dead child. After a lost reply, the next tick repeats it. */
inline recover(w) {
    atomic { phase[w] == DEAD -> lost = false };
        do  /* _write_outcomes */
        :: atomic { x < END(w) && !lost ->
            if
            :: HAS_ENDED(x) ->
                any_call();
                if :: call != NOT_EXECUTED -> write_and_fetch(x, PREFETCHES(w)) :: else fi;
                lost = call != REPLIED
            :: else
            fi;
            x++;
            end_step()
           }
        :: atomic { else -> x = FIRST(w); break }
        od;
        if
        :: atomic { !lost ->  /* renew_locks: an expired lock is reacquired */
            for (s : FIRST(w) .. END(w) - 1) {
                if :: HAS_JOB(s) -> renew_lock(s, job[s]) :: else fi
            };
            end_step()
           }
        :: else
        fi;
        do
        :: atomic { x < END(w) && !lost ->
            find_by_token(x);
            y = k;
            if
            :: y != NONE && MAY_HAVE_CRASHED(x, y) ->  /* _count_crash */
                any_call();
                if
                :: call != NOT_EXECUTED && !IS_COUNTED(x, y) ->
                    if :: crashes[y] <= MAX_CRASHES -> crashes[y]++ :: else fi;
                    crash_token[y] = TOKEN(x);
                    require(crash_counted_once, crashes[y] <= deaths[y])
                :: else
                fi;
                lost = call != REPLIED
            :: else
            fi;
            end_step()
           };
           atomic {
            if
            :: y != NONE && !lost ->  /* _finish_job */
                any_call();
                if
                :: call == NOT_EXECUTED
                :: call != NOT_EXECUTED && !MAY_HAVE_CRASHED(x, y) && HAS_ENDED(x) && job[x] == y ->
                    move_from_active_to_wait(x, y)  /* its outcome could not be written */
                :: call != NOT_EXECUTED && !MAY_HAVE_CRASHED(x, y) && !(HAS_ENDED(x) && job[x] == y) ->
                    release_unstarted(x, y)
                :: call != NOT_EXECUTED && MAY_HAVE_CRASHED(x, y) && IS_LAST_CRASH(x, y) ->
                    move_to_finished(x, y, FAIL)
                :: call != NOT_EXECUTED && MAY_HAVE_CRASHED(x, y) && !IS_LAST_CRASH(x, y) ->
                    move_from_active_to_wait(x, y)
                fi;
                lost = call != REPLIED
            :: else
            fi;
            x++; y = NONE;
            end_step()
           }
        :: atomic { else -> x = FIRST(w); break }
        od;
        atomic {
            if :: !lost -> start_child(w) :: else fi;
            lost = false;
            end_step()
        }
}

#ifdef TAKEOVER_WITHOUT_LOCK
#define CAN_LOCK(w) true
#define TAKE_LOCK(w) skip
#else
#define TAKE_LOCK(w) block[w] = BY_SUPERVISOR
#define CAN_LOCK(w) (block[w] == BY_NOBODY)
#endif

/* Takeover._release: the child must not start a job that Redis may have released. */
inline release(slot, id, after) {
    any_call();
    if :: call != NOT_EXECUTED -> release_unstarted(slot, id) :: else fi;
#ifdef NO_RELEASING_MARK
    if :: call == REPLIED -> state[slot] = after :: else fi;
#else
    state[slot] = (call == REPLIED -> after : RELEASING);
#endif
    lost = call != REPLIED
}

/* Takeover: while a job is running, write the outcomes of the child's other slots, and release the prefetched jobs. */
inline take_over(w) {
    atomic { phase[w] == RUNNING && CAN_LOCK(w) &&
            (COUNT_IN(w, PREFETCHED) + COUNT_IN(w, ENDED) > 0 || (HAS_SENT(w) && COUNT_IN(w, FINISHING) > 0)) ->
        TAKE_LOCK(w) };
    do
       /* _release_fetched: Redis has executed the call, or not yet */
       :: atomic { x < END(w) && !lost && phase[w] != DEAD && state[x] == FINISHING ->
            any_call();
            find_by_token(x);
            if
            :: call != REPLIED -> lost = true
            :: call == REPLIED && k == job[x] -> state[x] = ENDED  /* written below; the child has not seen this state */
            :: call == REPLIED && k == NONE -> state[x] = RELEASED; x++
            :: call == REPLIED && k != NONE && k != job[x] -> y = k; state[x] = RELEASING
            fi;
            end_step()
          };
          atomic {
            if :: y != NONE -> release(x, y, RELEASED); x++ :: else fi;
            y = NONE;
            end_step()
          }
       :: atomic { x < END(w) && !lost && phase[w] != DEAD && state[x] == ENDED ->  /* _write_outcomes */
            any_call();
            if :: call != NOT_EXECUTED -> write_and_fetch(x, PREFETCHES(w)) :: else fi;
            if
            :: call == REPLIED && result == OK -> state[x] = (k == NONE -> WRITTEN : RELEASING); y = k
            :: call == REPLIED && result == REJECTED ->  /* the child makes the call again, or has sent it */
                if :: written[x] != 0 -> state[x] = FINISHING :: else fi
            :: call != REPLIED -> state[x] = NO_REPLY; lost = true
            fi;
            end_step()
          };
          atomic {
            if :: y != NONE -> release(x, y, WRITTEN) :: else fi;
            x++; y = NONE;
            end_step()
          }
       :: atomic { x < END(w) && !lost && state[x] == PREFETCHED && phase[w] != DEAD -> y = job[x] };
          atomic { release(x, y, FREE); x++; y = NONE; end_step() }
       :: atomic { x < END(w) && !lost && (phase[w] == DEAD ||
            (state[x] != ENDED && state[x] != PREFETCHED && state[x] != FINISHING)) ->
            x++ }
       :: atomic { x == END(w) || lost ->
            x = FIRST(w); lost = false;
            if :: block[w] == BY_SUPERVISOR -> block[w] = BY_NOBODY :: else fi;
            break }
    od
}

#define NEEDS_CHECK(id) (in_active[id] && (!marked[id] || !checked[id] || lock[id] == 0))
#if JOBS > 2
#define SOME_JOB_NEEDS_CHECK (NEEDS_CHECK(0) || NEEDS_CHECK(1) || NEEDS_CHECK(2))
#else
#define SOME_JOB_NEEDS_CHECK (NEEDS_CHECK(0) || NEEDS_CHECK(1))
#endif

/* StalledCheck: it does not matter which worker runs the script. One that changes nothing is left out. */
proctype StalledCheck() {
    do
    :: atomic { SOME_JOB_NEEDS_CHECK -> move_stalled_jobs_to_wait(); end_step() }
    od
}

proctype Supervisor(byte w) {
    byte x = FIRST(w), y = NONE;
    bool lost;
running:
    {
        do
        :: heartbeat(w, FIRST(w))
#if SLOTS > 1
        :: heartbeat(w, 1)
#endif
#if SLOTS > 2
        :: heartbeat(w, 2)
#endif
        :: recover(w)
        :: take_over(w)
        od
    } unless {
        atomic { killed[w] -> killed[w] = false; x = FIRST(w); y = NONE; lost = false; goto running }
    }
}

/* ---- faults ---- */

/* Nobody renews the lock. */
#define HAS_FREE_LOCK(id) (lock[id] != 0 && (OWNER_IS_DEAD(lock[id]) || state[(lock[id] - 1) % ALL_SLOTS] == FREE))
#ifdef LIVENESS
#define BEATS(id) false
#else
#define BEATS(id) (beating[0] == id || beating[1] == id)
#endif

/* Locks that nobody renews expire. */
proctype Clock() {
    do
    :: atomic { HAS_FREE_LOCK(0) && !BEATS(0) -> lock[0] = 0 }
    :: atomic { HAS_FREE_LOCK(1) && !BEATS(1) -> lock[1] = 0 }
#if JOBS > 2
    :: atomic { HAS_FREE_LOCK(2) && !BEATS(2) -> lock[2] = 0 }
#endif
    od
}

inline expire(id) {
    lock[id] = 0; has_expired = true; expiries--; faults++
}

inline kill_worker(w) {
    drop_sent(w);
    start_child(w);
    killed[w] = true; beating[w] = NONE; worker_kills--; faults++
}

proctype Faults() {
    do
    :: atomic { expiries > 0 && lock[0] != 0 && !BEATS(0) -> expire(0) }
    :: atomic { expiries > 0 && lock[1] != 0 && !BEATS(1) -> expire(1) }
#if JOBS > 2
    :: atomic { expiries > 0 && lock[2] != 0 && !BEATS(2) -> expire(2) }
#endif
    :: atomic { child_kills > 0 && phase[0] != DEAD && phase[0] != IDLE ->
        child_kills--; faults++; die(0); end_step() }
    :: atomic { child_kills > 0 && phase[1] != DEAD && phase[1] != IDLE ->
        child_kills--; faults++; die(1); end_step() }
    :: atomic { worker_kills > 0 && !killed[0] -> kill_worker(0); end_step() }
    :: atomic { worker_kills > 0 && !killed[1] -> kill_worker(1); end_step() }
    od
}

/* ---- properties of every state ---- */

#define IN_ONE_PLACE(id) (in_wait[id] + in_active[id] + in_completed[id] + in_failed[id] == 1)
#define LOCKED_IF_ACTIVE(id) (lock[id] == 0 || in_active[id])
#define IS_FINISHED(id) (in_completed[id] || in_failed[id])
#if JOBS > 2
#define EVERY_JOB(is) (is(0) && is(1) && is(2))
#else
#define EVERY_JOB(is) (is(0) && is(1))
#endif
#define COSTS_NOTHING(id) (unstarted[id] <= faults)

proctype Monitor() {
    do
    :: atomic { !EVERY_JOB(IN_ONE_PLACE) -> assert(one_place) }
    :: atomic { !EVERY_JOB(LOCKED_IF_ACTIVE) -> assert(lock_only_active) }
    :: atomic { EVERY_JOB(IS_FINISHED) && !EVERY_JOB(COSTS_NOTHING) -> assert(prefetch_is_free) }
    od
}

#ifdef LIVENESS
ltl every_job_finishes { <> EVERY_JOB(IS_FINISHED) }
#endif

init {
    atomic {
        run Child(0); run Child(1); run Supervisor(0); run Supervisor(1); run Clock(); run Faults();
#ifndef NO_STALLED_CHECK
        run StalledCheck();
#endif
#ifndef LIVENESS
        run Monitor()
#endif
    }
}
