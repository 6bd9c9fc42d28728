//! `caching` against the real PyTorch 2.11 allocator: random programs; every event, counter and
//! block is compared.
//!
//! The real allocator runs without a GPU. `tools/torch-oracle/README.md` describes the build, the
//! environment variables, and what cannot be compared. Without it these tests print why they are
//! skipped and pass.

mod compare;
mod generate;
mod oracle;
mod ours;
mod program;

use std::{env, fs};

use compare::{Verdict, compare};
use generate::{random_program, random_settings};
use oracle::{Answer, Oracle};
use program::{Call, Program};

const SEEDS: u64 = 10;
/// Number of programs sent to one oracle process.
const BATCH: u64 = 50;

fn number(variable: &str, default: u64) -> u64 {
    env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn say(text: &str) {
    eprintln!("{text}");
}

fn oracle() -> Option<Oracle> {
    let oracle = Oracle::find();
    if oracle.is_none() {
        say("skipped: the torch oracle is not built (tools/torch-oracle/build.sh, or set OOMPH_TORCH_ORACLE)");
    }
    oracle
}

/// Shortens a differing program as far as possible, saves it and prints how to run it again.
fn report(oracle: &Oracle, program: &Program, first: &str, origin: &str) -> String {
    // A call without its partner (an end without a begin) would be refused, which is a different
    // failure.
    let refusals = |answer: &Answer| answer.lines.iter().filter(|line| line.starts_with("refused")).count();
    let accepted = oracle.run(std::slice::from_ref(program)).first().map_or(0, refusals);
    let short = program.shrunk(|candidate| {
        let answers = oracle.run(std::slice::from_ref(candidate));
        answers.first().is_some_and(|theirs| {
            refusals(theirs) <= accepted && matches!(compare(candidate, theirs), Verdict::Differs(_))
        })
    });
    let Verdict::Differs(difference) = judge(oracle, &short) else {
        return format!("{origin}: the difference is not reproducible: {first}\n{program}");
    };
    let path = oracle.folder().join(format!("difference-{}.txt", origin.replace(' ', "-")));
    let text = format!("# {origin}\n# {}\n{short}", difference.replace('\n', "\n# "));
    let saved = fs::write(&path, text).map_or_else(|error| error.to_string(), |()| path.display().to_string());
    format!(
        "{origin}: {difference}\nsaved: {saved}\nagain: OOMPH_TORCH_PROGRAM={saved} cargo test --test integration torch_oracle\n{short}"
    )
}

fn judge(oracle: &Oracle, program: &Program) -> Verdict {
    let answers = oracle.run(std::slice::from_ref(program));
    answers.first().map_or(Verdict::SetAside, |theirs| compare(program, theirs))
}

#[test]
fn random_programs_run_alike() {
    let Some(oracle) = oracle() else { return };
    if let Ok(path) = env::var("OOMPH_TORCH_PROGRAM") {
        let program: Program = fs::read_to_string(&path).unwrap().parse().unwrap();
        let program = Program { release: oracle.release, ..program };
        match judge(&oracle, &program) {
            Verdict::Differs(difference) => panic!("{path}: {difference}"),
            verdict => return say(&format!("{path}: {verdict:?}")),
        }
    }
    let per_seed = number("OOMPH_TORCH_PROGRAMS", 100);
    let first = number("OOMPH_TORCH_SEED", 1);
    let (mut alike, mut calls, mut cut_short) = (0, 0, 0);
    for seed in first..first + SEEDS {
        for start in (0..per_seed).step_by(BATCH as usize) {
            let numbers = start..(start + BATCH).min(per_seed);
            let mut programs: Vec<Program> =
                numbers.clone().map(|number| random_program(oracle.release, seed, number)).collect();
            for program in &mut programs {
                // The calls before this point are comparable.
                if let Some(call) = ours::run(program).spoilt_at {
                    program.calls.truncate(call);
                    cut_short += 1;
                }
            }
            let answers = oracle.run(&programs);
            assert_eq!(answers.len(), programs.len(), "the oracle stopped answering at seed {seed}");
            for ((program, theirs), number) in programs.iter().zip(&answers).zip(numbers) {
                match compare(program, theirs) {
                    Verdict::Alike => alike += 1,
                    Verdict::SetAside => unreachable!("the program ends before that"),
                    Verdict::Differs(first) => {
                        panic!("{}", report(&oracle, program, &first, &format!("seed {seed} program {number}")))
                    }
                }
                calls += program.calls.len();
            }
        }
    }
    say(&format!("{alike} equal programs, {calls} calls; {cut_short} end early where PyTorch loses memory in use"));
}

#[test]
fn settings_are_accepted_and_refused_alike() {
    let Some(oracle) = oracle() else { return };
    let texts: Vec<String> = (0..number("OOMPH_TORCH_PROGRAMS", 100) * 5).map(random_settings).collect();
    // Requests after the text, which show the effect of accepted settings.
    let sizes = [600, 5_000, 700_000, 3_000_001, 21_000_001, 84_000_001, 9_000_000_001u64];
    let requests = (0u64..).zip(sizes).map(|(id, bytes)| Call::Alloc { id, bytes, stream: 0 });
    let programs: Vec<Program> = texts
        .iter()
        .map(|text| Program {
            calls: std::iter::once(Call::Configure(text.clone())).chain(requests.clone()).collect(),
            release: oracle.release,
            ..Program::default()
        })
        .collect();
    let answers = oracle.run(&programs);
    assert_eq!(answers.len(), programs.len());
    for (program, theirs) in programs.iter().zip(&answers) {
        // PyTorch keeps the settings that it parsed before it refuses a text; in `caching` a
        // refused text changes nothing.
        let refused = |line: &&String| line.starts_with("refused");
        let ours = ours::run(program);
        if !theirs.finished {
            // Up to 2.9 the parser reads past the end of a list that is not closed.
            assert!(ours.lines.iter().any(|line| refused(&line)), "PyTorch crashes on accepted settings:\n{program}");
            continue;
        }
        if theirs.lines.iter().any(|line| refused(&line)) || ours.lines.iter().any(|line| refused(&line)) {
            let (theirs, ours) = (theirs.lines.iter().find(refused), ours.lines.iter().find(refused));
            assert_eq!(theirs, ours, "settings accepted by one and refused by the other:\n{program}");
        } else if theirs.lines.iter().any(|line| line.starts_with("stat ") && line.contains(" -")) {
            // Both accept a size of -1 MiB, after which PyTorch's counters go below zero.
        } else if let Verdict::Differs(difference) = compare(program, theirs) {
            panic!("{difference}\n{program}");
        }
    }
}
