//! MiniMalloc buffer lists: every file that can be read gives a consistent trace.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use oomph::trace::{check, minimalloc};

fuzz_target!(|file: &[u8]| {
    if let Ok(imported) = minimalloc::read(&mut &file[..], Path::new("fuzz")) {
        check(&imported.trace).expect("an imported trace is consistent");
    }
});
