//! MiniMalloc's lists of buffers: whatever can be read holds together as a trace.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use oomph::trace::{check, minimalloc};

fuzz_target!(|file: &[u8]| {
    if let Ok(imported) = minimalloc::read(&mut &file[..], Path::new("fuzz")) {
        check(&imported.trace).expect("an imported story holds together");
    }
});
