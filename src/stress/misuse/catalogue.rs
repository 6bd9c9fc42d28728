//! Every misuse there is. Adding one is a scenario in `handles` or `requests` and an entry here.

use super::{Door, Misuse, handles, requests};

const BOTH: &[Door] = &[Door::Handle, Door::Address];
const HANDLE: &[Door] = &[Door::Handle];

/// Every misuse, in the order of tables.
pub static MISUSES: &[Misuse] = &[
    Misuse { name: "double-free", summary: "a block is freed twice", doors: BOTH, play: handles::double_free },
    Misuse {
        name: "double-free-reused",
        summary: "a block is freed again after its memory went to another",
        doors: BOTH,
        play: handles::double_free_reused,
    },
    Misuse {
        name: "double-free-waiting",
        summary: "a block is freed again while its first free waits for a stream",
        doors: BOTH,
        play: handles::double_free_waiting,
    },
    Misuse {
        name: "foreign-pointer",
        summary: "memory of somebody else is freed and used",
        doors: BOTH,
        play: handles::foreign_pointer,
    },
    Misuse {
        name: "interior-pointer",
        summary: "an address inside a block is freed and used",
        doors: BOTH,
        play: handles::interior_pointer,
    },
    Misuse {
        name: "null-pointer",
        summary: "the null address is freed and used",
        doors: BOTH,
        play: handles::null_pointer,
    },
    Misuse {
        name: "forged-handle",
        summary: "handles with a wrong slot, generation or address",
        doors: HANDLE,
        play: handles::forged_handle,
    },
    Misuse {
        name: "wrong-size",
        summary: "a block is freed with another size than it has",
        doors: HANDLE,
        play: handles::wrong_size,
    },
    Misuse {
        name: "use-after-free",
        summary: "a freed block is used on a stream",
        doors: BOTH,
        play: handles::use_after_free,
    },
    Misuse {
        name: "use-after-reuse",
        summary: "a freed block is used after its memory went to another",
        doors: BOTH,
        play: handles::use_after_reuse,
    },
    Misuse {
        name: "free-after-trim",
        summary: "a block is freed again after its memory went back to the device",
        doors: BOTH,
        play: handles::free_after_trim,
    },
    Misuse {
        name: "use-after-trim",
        summary: "a block is used after its memory went back to the device",
        doors: BOTH,
        play: handles::use_after_trim,
    },
    Misuse {
        name: "free-after-close",
        summary: "a block outlives its strategy and is freed",
        doors: BOTH,
        play: handles::free_after_close,
    },
    Misuse {
        name: "use-after-close",
        summary: "a block outlives its strategy and is used",
        doors: BOTH,
        play: handles::use_after_close,
    },
    Misuse {
        name: "free-on-other-stream",
        summary: "a free is ordered on another stream than the block's",
        doors: BOTH,
        play: requests::free_on_other_stream,
    },
    Misuse {
        name: "free-on-unknown-stream",
        summary: "a free is ordered on a stream that does not exist",
        doors: BOTH,
        play: requests::free_on_unknown_stream,
    },
    Misuse {
        name: "use-on-unknown-stream",
        summary: "a block is used on a stream that does not exist, and freed",
        doors: BOTH,
        play: requests::use_on_unknown_stream,
    },
    Misuse {
        name: "request-on-unknown-stream",
        summary: "memory is asked for on a stream that does not exist, and freed there",
        doors: HANDLE,
        play: requests::request_on_unknown_stream,
    },
    Misuse {
        name: "free-from-other-thread",
        summary: "a thread frees what another allocated",
        doors: BOTH,
        play: requests::free_from_other_thread,
    },
    Misuse { name: "zero-bytes", summary: "nothing is asked for", doors: HANDLE, play: requests::zero_bytes },
    Misuse {
        name: "more-than-device",
        summary: "more is asked for than the device has",
        doors: HANDLE,
        play: requests::more_than_device,
    },
    Misuse {
        name: "half-of-all-addresses",
        summary: "about 2^63 bytes are asked for",
        doors: HANDLE,
        play: requests::half_of_all_addresses,
    },
    Misuse {
        name: "size-overflow",
        summary: "sizes so close to 2^64 are asked for that rounding them up overflows",
        doors: HANDLE,
        play: requests::size_overflow,
    },
    Misuse {
        name: "unknown-pool",
        summary: "private pools are ended and released that never began",
        doors: HANDLE,
        play: requests::unknown_pool,
    },
    Misuse {
        name: "nonsense-settings",
        summary: "settings and memory fractions that mean nothing",
        doors: HANDLE,
        play: requests::nonsense_settings,
    },
];
