//! The `oomph` binary: see [`oomph::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    oomph::cli::main()
}
