//! STAlloc text traces: every file that can be read gives a consistent trace.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use oomph::trace::{check, stalloc};

fuzz_target!(|file: &[u8]| {
    if let Ok(imported) = stalloc::read(&mut &file[..], Path::new("fuzz")) {
        check(&imported.trace).expect("an imported trace is consistent");
    }
});
