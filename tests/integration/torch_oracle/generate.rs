//! Random programs: all settings, limits, streams busy and idle, private pools, and every boundary
//! size.

use oomph::pytorch::{Release, TieOrder};

use super::{
    ours::STREAMS,
    program::{Call, Program},
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A small random number generator whose output does not change between library releases.
struct SeededRandom(u64);

impl SeededRandom {
    fn roll(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.roll() % end
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// Generates one random program.
struct ProgramGenerator {
    release: Release,
    random: SeededRandom,
    calls: Vec<Call>,
    live: Vec<u64>,
    next_id: u64,
    streams: Vec<u64>,
    users: Vec<u64>,
    largest: u64,
    total: u64,
    /// Percent of requests that are small.
    small: u64,
    /// Percent of steps that free.
    frees: u64,
    pools: Pools,
}

/// The current private pools of a program. Numbers are not reused: whether a pool can be created
/// again depends on the state of its memory.
#[derive(Default)]
struct Pools {
    wanted: bool,
    next: u64,
    retained: Vec<u64>,
    routed: Vec<u64>,
    /// A stream is being captured (from 2.13 on; before, every route is a capture).
    capturing: bool,
    /// Blocks recorded on a stream during a capture. They are freed during it, because PyTorch
    /// otherwise leaves an entry behind under the block's host address, which breaks the next block
    /// at that address.
    noted: Vec<u64>,
    /// At most one: PyTorch tries several in the order of a hash table.
    has_fallback: bool,
    fallback: Option<u64>,
}

/// Program `number` of a seed.
pub fn random_program(release: Release, seed: u64, number: u64) -> Program {
    let mut random = SeededRandom(seed << 32 | number);
    let total = match random.below(8) {
        0 => random.between(80, 600) * MIB,
        1 => random.between(1, 4) * GIB,
        _ => 80 * GIB,
    };
    let capacity = match random.below(3) {
        0 => 80 * GIB,
        1 => random.between(60, 400) * MIB,
        _ => random.between(200, 2000) * MIB + random.below(4096) * 512,
    };
    let mut streams = STREAMS.to_vec();
    for place in (1..streams.len()).rev() {
        streams.swap(place, random.below(place as u64 + 1) as usize);
    }
    let mut users = STREAMS.to_vec();
    users.retain(|_| random.chance(50));
    match random.below(4) {
        0 => users.clear(),
        1 | 2 => users.truncate(1),
        _ => {}
    }
    streams.truncate(random.between(1, 4) as usize);
    let largest = random.choose(&[8, 40, 100, 200, 400]) * MIB;
    let mut generator = ProgramGenerator {
        release,
        small: random.choose(&[5, 30, 70]),
        frees: random.choose(&[35, 45, 50]),
        random,
        calls: Vec::new(),
        live: Vec::new(),
        next_id: 0,
        streams,
        users,
        largest: largest.min(total),
        total,
        pools: Pools::default(),
    };
    generator.pools.wanted = generator.random.chance(25) && release >= Release::new(3);
    if release.rules().ties == TieOrder::Block {
        // Here the order in which frees complete decides which block of equal size is taken next. It is that of a hash
        // table, unless all blocks wait for one stream and none for the end of a capture.
        let one = usize::from(!generator.pools.wanted);
        generator.users.truncate(one);
    }
    let environment = if generator.random.chance(50) { generator.settings() } else { String::new() };
    if generator.random.chance(40) {
        generator.fraction();
    }
    let length = generator.random.between(200, 700);
    while (generator.calls.len() as u64) < length {
        generator.step();
    }
    let downwards = generator.random.chance(50);
    // Up to 2.9 a fraction is one of what cudaMemGetInfo calls the total.
    let memory_total = if generator.random.chance(30) { total - total / 64 } else { total };
    Program { release, total, memory_total, capacity, downwards, environment, calls: generator.calls }
}

impl ProgramGenerator {
    fn step(&mut self) {
        match self.random.below(1000) {
            0..10 => {
                let text = self.settings();
                self.calls.push(Call::Configure(text));
            }
            10..15 => self.fraction(),
            15..30 => self.calls.push(Call::EmptyCache),
            30..70 if !self.users.is_empty() => {
                let stream = self.random.choose(&self.users);
                self.calls.push(if self.random.chance(50) { Call::Busy { stream } } else { Call::Idle { stream } });
            }
            70..150 if !self.users.is_empty() => {
                if let Some(&id) = self.live.get(self.random.below(self.live.len().max(1) as u64) as usize) {
                    let stream = self.random.choose(&self.users);
                    self.calls.push(Call::UsedOn { id, stream });
                    if self.is_capturing() {
                        self.pools.noted.push(id);
                    }
                }
            }
            150..180 if self.pools.wanted => self.pool(),
            _ if self.random.chance(self.frees) && !self.live.is_empty() => self.free(),
            _ => self.alloc(),
        }
    }

    fn alloc(&mut self) {
        let id = self.next_id;
        self.next_id += 1;
        let bytes = self.size();
        let stream = self.random.choose(&self.streams);
        self.calls.push(Call::Alloc { id, bytes, stream });
        self.live.push(id);
    }

    fn free(&mut self) {
        let place = match self.random.below(3) {
            0 => 0,
            1 => self.live.len() - 1,
            _ => self.random.below(self.live.len() as u64) as usize,
        };
        // Occasionally free everything.
        if self.random.chance(1) {
            let all = std::mem::take(&mut self.live);
            self.calls.extend(all.into_iter().map(|id| Call::Free { id }));
        } else {
            let id = self.live.remove(place);
            self.calls.push(Call::Free { id });
        }
    }

    fn size(&mut self) -> u64 {
        if self.random.chance(self.small) {
            return match self.random.below(4) {
                0 => self.random.between(1, 2048),
                1 => self.random.between(1, 64) * 512,
                2 => self.random.between(1, MIB),
                _ => self.random.choose(&[1, 511, 512, 513, MIB - 512, MIB - 1, MIB]),
            };
        }
        let bytes = match self.random.below(7) {
            0 | 1 => self.random.between(MIB + 1, 10 * MIB),
            2 => self.random.choose(&[MIB + 1, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 20 * MIB, 20 * MIB + 512]),
            3 => self.random.between(1, self.largest / MIB) * MIB,
            4 => self.random.between(1, self.largest / MIB) * MIB + self.random.between(0, 4) * 512,
            5 => self.random.choose(&[40, 41, 50, 60, 64, 80]) * MIB,
            _ => self.random.between(MIB, self.largest),
        };
        // A request larger than a whole address range, after rounding, crashes PyTorch.
        bytes.min(self.total / 4 * 3)
    }

    /// Whether the release is 2.`minor` or a later one.
    fn has(&self, minor: u8) -> bool {
        self.release >= Release::new(minor)
    }

    /// Whether the allocator assumes that a stream is being captured.
    fn is_capturing(&self) -> bool {
        if self.has(13) { self.pools.capturing } else { !self.pools.routed.is_empty() }
    }

    fn fraction(&mut self) {
        let fraction = if self.random.chance(20) {
            1.0
        } else {
            self.random.between(50, 600) as f64 * MIB as f64 / self.total as f64
        };
        self.calls.push(Call::Fraction(fraction.min(1.0)));
    }

    fn settings(&mut self) -> String {
        let mut parts = Vec::new();
        let segment =
            if self.random.chance(15) && self.has(11) { self.random.choose(&[12, 16, 20, 24, 40]) } else { 0 };
        if segment > 0 {
            parts.push(format!("large_segment_size_mb:{segment}"));
        }
        // Not smaller than any segment size that may still apply.
        if self.random.chance(45) {
            let least = if self.has(11) { 40 } else { 21 };
            parts.push(format!("max_split_size_mb:{}", self.random.choose(&[least, 40, 50, 64, 100])));
            if self.random.chance(30) && self.has(6) {
                parts.push(format!("max_non_split_rounding_mb:{}", self.random.choose(&[40, 50, 100])));
            }
        }
        if self.random.chance(40) {
            parts.push(format!("garbage_collection_threshold:{}", self.random.choose(&["0.2", "0.5", "0.8", "0.95"])));
        }
        if self.random.chance(25) {
            let divisions = ["1", "2", "4", "8", "[1:2,4:4,>:8]", "[64:8,256:4,1024:4,>:1]", "[2:0,16:4]"];
            // A value of 0 is accepted from 2.4 on.
            let known = if self.has(4) { divisions.len() } else { divisions.len() - 1 };
            parts.push(format!("roundup_power2_divisions:{}", self.random.choose(&divisions[..known])));
        }
        if self.random.chance(60) && self.has(1) {
            parts.push(format!("expandable_segments:{}", self.random.choose(&["True", "True", "False"])));
        }
        if self.random.chance(20) && self.has(12) {
            parts.push(format!("throw_on_cudamalloc_oom:{}", self.random.choose(&["True", "True", "False"])));
        }
        if self.random.chance(15) && self.has(10) {
            let share = self.random.between(50, 600) as f64 * MIB as f64 / self.total as f64;
            parts.push(format!("per_process_memory_fraction:{}", share.min(1.0)));
        }
        if self.random.chance(20) && self.has(15) {
            let reserve = self.random.choose(&["0.5", "0.01", "0.3", "0.05G", "0.1G", "2G", "1e9G", "x"]);
            parts.push(format!("expandable_segments_reserve:{reserve}"));
        }
        for place in (1..parts.len()).rev() {
            parts.swap(place, self.random.below(place as u64 + 1) as usize);
        }
        parts.join(",")
    }

    fn pool(&mut self) {
        match self.random.below(8) {
            0 | 1 => self.new_pool(),
            2 | 3 if !self.pools.routed.is_empty() => {
                let place = self.random.below(self.pools.routed.len() as u64) as usize;
                let pool = self.pools.routed.remove(place);
                if !self.is_capturing() {
                    self.free_noted();
                }
                self.calls.push(Call::PoolEnd { pool });
            }
            4 if !self.pools.retained.is_empty() => {
                let pool = self.random.choose(&self.pools.retained);
                if !self.pools.routed.contains(&pool) {
                    self.begin(pool);
                } else if self.has(6) {
                    self.pools.retained.push(pool);
                    self.calls.push(Call::PoolRetain { pool, use_on_oom: false });
                }
            }
            5 if !self.pools.retained.is_empty() => self.release_pool(),
            6 | 7 if self.has(13) => {
                self.pools.capturing ^= true;
                if self.pools.capturing {
                    self.calls.push(Call::CaptureBegin);
                } else {
                    self.free_noted();
                    self.calls.push(Call::CaptureEnd);
                }
            }
            _ => {}
        }
    }

    /// Private pools can be created without requests from 2.6 on.
    fn new_pool(&mut self) {
        self.pools.next += 1;
        let pool = self.pools.next;
        if !self.random.chance(50) || !self.has(6) {
            return self.begin(pool);
        }
        self.pools.retained.push(pool);
        let use_on_oom = !self.pools.has_fallback && self.random.chance(50) && self.has(8);
        if use_on_oom {
            self.pools.has_fallback = true;
            self.pools.fallback = Some(pool);
        }
        self.calls.push(Call::PoolRetain { pool, use_on_oom });
    }

    /// Frees what was recorded on a stream during the capture that ends now.
    fn free_noted(&mut self) {
        let noted = std::mem::take(&mut self.pools.noted);
        self.live.retain(|id| !noted.contains(id));
        self.calls.extend(noted.into_iter().map(|id| Call::Free { id }));
    }

    fn release_pool(&mut self) {
        let pool = self.random.choose(&self.pools.retained);
        // PyTorch fails on a fallback pool without users.
        if self.pools.fallback == Some(pool) || self.pools.routed.contains(&pool) {
            return;
        }
        let count = self.pools.retained.iter().filter(|&&other| other == pool).count();
        self.pools.retained.retain(|&other| other != pool);
        self.calls.extend((0..count).map(|_| Call::PoolRelease { pool }));
    }

    fn begin(&mut self, pool: u64) {
        let stream = if self.random.chance(50) { None } else { Some(self.random.choose(&self.streams)) };
        self.pools.routed.push(pool);
        // Each begin adds a user.
        self.pools.retained.push(pool);
        self.calls.push(Call::PoolBegin { pool, stream });
    }
}

/// A text that may or may not be a valid list of settings.
pub fn random_settings(number: u64) -> String {
    let mut random = SeededRandom(number.wrapping_mul(77) + 5);
    let keys = [
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
        "expandable_segments",
        "large_segment_size_mb",
        "per_process_memory_fraction",
        "release_lock_on_cudamalloc",
        "graph_capture_record_stream_reuse",
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "backend",
        "max_split_size",
        "throw_on_cudamalloc_oom",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "expandable_segments_reserve",
        "expandable_segments_reserve_by_class",
        "release_lock_on_hipmalloc",
        "pinned_use_hip_host_register",
    ];
    let values = [
        "40",
        "20",
        "19",
        "64abc",
        "-1",
        "+64",
        "0",
        "1",
        "2",
        "3",
        "4",
        "128",
        "256",
        "11",
        "10",
        "0.5",
        ".5",
        "0.5x",
        "1.0",
        "1e-1",
        "2.0",
        "-0.5",
        "True",
        "False",
        "true",
        "native",
        "cudaMallocAsync",
        "[",
        "[1:2,4:4,>:8]",
        "[256:1,512:2]",
        "[3:4]",
        "[4:3]",
        "[>:2]",
        "[]",
        "[1:2",
        "[1:2,>:4],",
        "[65536:8]",
        "[16:0,>:2]",
        "",
        "x",
        "18446744073709551616",
        "4294967296",
        "0.01G",
        "[a:0.5,b:2G]",
        "[a",
    ];
    let mut text = String::new();
    for place in 0..random.between(1, 3) {
        if place > 0 {
            text += if random.chance(85) { "," } else { random.choose(&[":", ",,", " , ", "]", ""]) };
        }
        let key = random.choose(&keys);
        text += key;
        text += if random.chance(90) { ":" } else { random.choose(&["=", ",", "", " : ", "::"]) };
        // Classes of streams are not modelled: their list is read over, and anything else refused.
        text += if key.ends_with("by_class") { "[a:0.5,b:2G]" } else { random.choose(&values) };
    }
    text
}
