//! STAlloc's text traces: whatever can be read holds together as a trace.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use oomph::trace::{check, stalloc};

fuzz_target!(|file: &[u8]| {
    if let Ok(imported) = stalloc::read(&mut &file[..], Path::new("fuzz")) {
        check(&imported.trace).expect("an imported story holds together");
    }
});
