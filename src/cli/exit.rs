//! Exit codes: a contract with scripts. 101 is left free, because it is what a panic gives.

/// Everything went well.
pub const OK: u8 = 0;
/// Something unexpected went wrong.
pub const FAILURE: u8 = 1;
/// The command line, a suite, a workload or a trace is wrong.
pub const USAGE: u8 = 2;
/// The filters leave no case to run.
pub const NOTHING_SELECTED: u8 = 4;
/// `verify`: some recording is not re-lived exactly, or some decision is not the same on the same answers. A GPU does not
/// confirm a threshold.
pub const NOT_EXACT: u8 = 100;
/// `compare`, `run --baseline`: something got worse.
pub const REGRESSION: u8 = 102;
/// The device that was asked for is not there.
pub const DEVICE_UNAVAILABLE: u8 = 103;
/// Some cases could not be run; the others are in the results.
pub const CASES_FAILED: u8 = 104;
/// `leaks`: memory grows in a way that `--fail-on` names.
pub const MEMORY_GROWS: u8 = 105;
/// `stress`: a promise was broken.
pub const STRESS_FAILED: u8 = 106;
/// `report`: the shards are not one whole run.
pub const NOT_WHOLE: u8 = 107;
/// Ctrl-C or SIGTERM: what was finished is in the results.
pub const INTERRUPTED: u8 = 130;

/// The table under `--help`.
pub const HELP: &str = "\
Exit codes:
    0  ok (running out of memory is a result, not a failure)
    1  unexpected error
    2  bad usage, suite, workload or trace
    4  nothing selected
  100  verify: some recording is not exact; verify, threshold: a device disagrees
  102  compare, run --baseline: something got worse
  103  the requested device is not available
  104  some cases failed to run
  105  leaks: memory grows
  106  stress: a promise was broken
  107  report: the shards are not one whole run
  130  interrupted (Ctrl-C, SIGTERM); finished cases are kept";
