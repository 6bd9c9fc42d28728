//! What commands print in a terminal of 80 columns: every table fits, no word is broken, prose is wrapped.

use std::path::Path;

use super::command::oomph;

const WIDTH: usize = 80;
/// Signs after which a name may go on in the next line.
const SIGNS: [char; 6] = [':', ',', '/', '=', '@', '-'];
/// How sentences begin that only one of two runs may have: a narrow terminal gets fewer columns, and the machine may be busy
/// during one run.
const IN_ONE_RUN: [&str; 2] = ["Columns hidden because the terminal is narrow:", "The machine was busy:"];

/// Standard output of a command whose reader sees this many columns.
fn output(arguments: &str, folder: &Path, columns: Option<usize>) -> String {
    let mut command = oomph(env!("CARGO_MANIFEST_DIR"));
    let arguments = arguments.replace("{folder}", &folder.display().to_string());
    command.args(arguments.split_whitespace()).env("LC_ALL", "C.UTF-8").env_remove("COLUMNS");
    if let Some(columns) = columns {
        command.env("COLUMNS", columns.to_string());
    }
    let ended = command.output().unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() < Some(2) || ended.status.code() >= Some(100), "{arguments}: {errors}");
    String::from_utf8(ended.stdout).unwrap()
}

/// Whether a line may be longer than the terminal: one word, such as a path, or a command to copy.
fn may_be_long(line: &str) -> bool {
    let value = line.rsplit_once("  ").map_or(line, |(_, value)| value).trim();
    !value.contains(' ') || ["oomph ", "export "].iter().any(|program| value.contains(program))
}

/// Units of figures that differ from run to run: a rate may be in MiB at one time and in GiB at the next.
const UNITS: [&str; 10] = ["B", "KiB", "MiB", "GiB", "TiB", "ns", "us", "ms", "s", "min"];

/// A text in one line without the sentences that begin so.
fn without(text: &str, beginning: &str) -> String {
    let mut parts = text.split(beginning);
    let first = parts.next().unwrap_or("").to_owned();
    parts.filter_map(|part| part.split_once(". ")).fold(first, |text, (_, after)| text + after)
}

/// The words of a text, without units and without the sentences that the other run may not have.
fn words(text: &str) -> Vec<String> {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = IN_ONE_RUN.iter().fold(text, |text, beginning| without(&text, beginning));
    let words = text.split_whitespace().filter(|word| word.chars().any(char::is_alphabetic));
    words.filter(|word| !UNITS.contains(word)).map(str::to_owned).collect()
}

#[test]
fn sentences_of_one_run_are_left_out() {
    let text = "Spread: of rounds. The machine was busy: 1 of 1 rows spread by more than 10 %. Columns hidden\nbecause the terminal is \
                narrow: free ns. results: folder";
    assert_eq!(words(text), ["Spread:", "of", "rounds.", "results:", "folder"]);
}

/// Whether a word of the narrow text is whole, or a part of a name that begins and ends at a sign.
fn is_unbroken(word: &str, whole: &[String]) -> bool {
    let ends_well = |of: &str, start: usize| {
        let end = start + word.len();
        let rest_is_punctuation = of[end..].chars().all(|sign| sign.is_ascii_punctuation());
        (start == 0 || of[..start].ends_with(SIGNS)) && (rest_is_punctuation || word.ends_with(SIGNS))
    };
    whole.iter().any(|of| of.match_indices(word).any(|(start, _)| ends_well(of, start)))
}

#[track_caller]
fn check(arguments: &str) {
    let folder = tempfile::tempdir().unwrap();
    let narrow = output(&arguments.replace("{folder}", "{folder}/narrow"), folder.path(), Some(WIDTH));
    let wide = output(&arguments.replace("{folder}", "{folder}/wide"), folder.path(), None);
    for line in narrow.lines() {
        let length = line.chars().count();
        assert!(length <= WIDTH || may_be_long(line), "{arguments}: {length} columns:\n{line}\n\n{narrow}");
    }
    let whole = words(&wide.replace("/wide", "/narrow"));
    for word in words(&narrow) {
        assert!(is_unbroken(&word, &whole), "{arguments}: '{word}' is broken:\n{narrow}\n\n{wide}");
    }
}

#[test]
fn lists_and_checks_of_the_set_up_fit() {
    for arguments in
        ["list", "list strategies --long", "list generators --long", "list suites", "doctor", "claims --list", "help"]
    {
        check(arguments);
    }
}

#[test]
fn answers_about_recordings_fit() {
    const RECORDED: &str = "workloads/recorded";
    for arguments in [
        "inspect {}/train_base.pickle.xz",
        "inspect {}/oom_base.pickle.xz --summary --at peak",
        "inspect training --by tag --top 200",
        "inspect training --pack",
        "advise {}/oom_base.pickle.xz",
        "leaks {}/leak_outputs.pickle.xz",
        "leaks leak-outputs --limit 24GiB",
        "verify {}/train_base.pickle.xz {}/oom_base.pickle.xz {}/streams.exp_round.pickle.xz",
        "replay {}/oom_base.pickle.xz --limit 1GiB",
        "threshold training --strategy caching --strategy caching:expandable_segments:True --probes 1",
        "threshold training --largest batch --card 8GiB,24GiB --strategy caching --probes 1",
    ] {
        check(&arguments.replace("{}", RECORDED));
    }
}

#[test]
fn answers_about_models_fit() {
    for arguments in [
        "fits llama-3.2-1b --card 12GiB --techniques bf16_model",
        "techniques --model reference-gpt-163m --card 24GiB --technique amp --technique ckpt",
        "claims fp16-30 set-to-none",
        "run claims --filter fp16-30 --filter set-to-none --output {folder}",
    ] {
        check(arguments);
    }
}

#[test]
fn comparisons_of_strategies_fit() {
    for arguments in [
        "replay training variable-length --limit 8GiB",
        "replay training --waterfall --pack",
        "replay training --release 2.1 --release 2.11",
        "run quick --output {folder}",
        "run throughput --filter hot-512/null --output {folder}",
        "compare tests/data/schema-1/quick tests/data/schema-1/quick",
    ] {
        check(arguments);
    }
}

#[test]
fn stress_fits() {
    for arguments in [
        // Enough time for every kind, so that both runs say the same.
        "stress all --seconds 5 --strategy caching --strategy oomph",
        "stress misuse",
        "stress misuse --strategy caching",
        "stress properties --cases 3",
        "stress history --strategy bfc",
        "stress adversary --strategy caching:expandable_segments:True --strategy arena",
        "stress integrity --stress-duration 1s",
        "stress soak --stress-duration 1s",
    ] {
        check(arguments);
    }
}

#[test]
fn column_that_is_left_out_is_not_explained() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "replay training --strategy caching --strategy direct";
    assert!(output(arguments, folder.path(), None).contains("Fragmentation ="));
    let narrow = output(arguments, folder.path(), Some(48));
    assert!(narrow.contains("Columns hidden") && !narrow.contains("Fragmentation ="), "{narrow}");
    let quick = output("run quick --filter training --filter random --output {folder}/run", folder.path(), None);
    assert!(quick.contains("Appetite: peak reserved memory") && !quick.contains("Both as multiples"), "{quick}");
}

#[test]
fn line_of_a_run_ends_where_memory_ran_out() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "replay training --strategy caching --strategy null --limit 8GiB";
    let text = output(arguments, folder.path(), Some(WIDTH));
    let (_, lines) = text.split_once("reserved over events\n").unwrap();
    let drawn = |name: &str| {
        let line = lines.lines().find(|line| line.starts_with(name)).unwrap();
        line.chars().filter(|sign| ('▁'..='█').contains(sign)).count()
    };
    assert!(text.contains("step 0"), "{text}");
    assert!(drawn("caching") > 0 && drawn("caching") * 4 < drawn("null"), "{text}");
}

#[test]
fn inspect_counts_bytes_and_few_names() {
    let folder = tempfile::tempdir().unwrap();
    let text = output("inspect training --by tag --top 200", folder.path(), Some(WIDTH));
    let (categories, tags) = text.split_once(" tag ").unwrap();
    assert!(categories.contains(" activation ") && !categories.contains("of layer"), "{text}");
    assert!(tags.contains("activation of layers 0-11"), "{text}");
    let text = output("inspect training", folder.path(), Some(WIDTH));
    let (_, sizes) = text.split_once("\nsizes ").unwrap();
    let largest = sizes.lines().find(|line| line.trim_start().starts_with("1.00 GiB ..")).unwrap();
    assert!(largest.split_whitespace().collect::<Vec<_>>().join(" ").contains("24 36.8 GiB"), "{largest}");
    assert!(text.lines().any(|line| line.contains("|") && line.contains("██")), "{text}");
}
