//! `oomph stress faults` and `oomph stress misuse`.

use super::{code, oomph, rows, stderr, stdout};

#[test]
fn faults_cover_every_driver_call() {
    let folder = tempfile::tempdir().unwrap();
    let play = || oomph(folder.path(), "stress faults --strategy arena --strategy tlsf --limit 96MiB --format json");
    let first = play();
    assert_eq!(code(&first), 0, "{}{}", stdout(&first), stderr(&first));
    for row in rows(&first) {
        assert_eq!((row["kind"].as_str(), row["verdict"].as_str()), (Some("faults"), Some("passed")), "{row}");
        assert!(row["trials"].as_u64().unwrap() > 300, "{row}");
        assert!(row["ooms"].as_u64().unwrap() > 0, "{row}");
    }
    assert_eq!(first.stdout, play().stdout);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing broke, so nothing is saved");
}

#[test]
fn trace_runs_under_the_given_faults() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(code(&oomph(folder.path(), "convert adversary-ladder ladder.oomph")), 0);
    let base = "stress faults --trace ladder.oomph --strategy caching --limit 8GiB --format json";
    let played = |more: &str| {
        let output = oomph(folder.path(), &format!("{base} {more}"));
        assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
        rows(&output).remove(0)
    };
    let one = played("--fault cuMemAlloc:2");
    assert_eq!(one["trials"], 2, "a clean run and one with the fault");
    assert_eq!(played("--fault cuMemAlloc:2:oom --fault taken:5+9 --fault stuck:3 --fault any:4+2")["trials"], 5);
}

#[test]
fn unknown_fault_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let output = oomph(folder.path(), "stress faults --strategy direct --fault cuMemAloc:2");
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("did you mean 'cuMemAlloc'?"), "{}", stderr(&output));
}

#[test]
fn misuse_is_reported_by_strategy() {
    let folder = tempfile::tempdir().unwrap();
    let table = oomph(folder.path(), "stress misuse --strategy direct --strategy caching --strategy oomph");
    assert_eq!(code(&table), 0, "{}", stderr(&table));
    let text = stdout(&table);
    let line = |name: &str| text.lines().find(|line| line.split_whitespace().next() == Some(name)).unwrap();
    assert_eq!(line("double-free").split_whitespace().skip(1).collect::<Vec<_>>(), ["d", "d", "d"], "{text}");
    assert!(!text.contains(" X "), "{text}");

    let json =
        oomph(folder.path(), "stress misuse --strategy caching --misuse wrong-size --misuse double-free --format json");
    let told: Vec<(String, String, String)> = rows(&json)
        .iter()
        .map(|row| ["misuse", "access_path", "consequence"].map(|key| row[key].as_str().unwrap().to_owned()).into())
        .collect();
    let expected = [
        ("double-free", "handle", "detected"),
        ("double-free", "address", "detected"),
        ("wrong-size", "handle", "harmless"),
    ];
    assert_eq!(told, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    let csv = stdout(&oomph(folder.path(), "stress misuse --strategy direct --format csv"));
    assert!(csv.starts_with("strategy,misuse,access_path,consequence,detail\n"), "{csv}");
}

#[test]
fn misuses_are_listed_and_slips_explained() {
    let folder = tempfile::tempdir().unwrap();
    let list = oomph(folder.path(), "stress misuse --list");
    assert_eq!(code(&list), 0);
    assert!(stdout(&list).contains("size-overflow"), "{}", stdout(&list));
    let unknown = oomph(folder.path(), "stress misuse --misuse double-fre");
    assert_eq!(code(&unknown), 2);
    assert!(stderr(&unknown).contains("did you mean 'double-free'?"), "{}", stderr(&unknown));
    assert_eq!(code(&oomph(folder.path(), "stress misuse --trace x.oomph")), 2);
}
