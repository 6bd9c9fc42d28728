//! What becomes of cases whose allocator is a file.

use serde_json::Value;

use super::{Workshop, library, plugin};

#[test]
fn a_plugin_is_replayed_like_any_strategy() {
    let Some(workshop) = Workshop::open() else { return };
    let theirs = workshop.replay("training", &plugin(&workshop.allocator("WELL_BEHAVED")), &[]);
    let ours = workshop.replay("training", "null", &[]);
    assert_eq!(theirs["status"], "completed", "{theirs}");
    for column in ["events", "allocs", "frees", "peak_requested_bytes"] {
        assert_eq!(theirs[column], ours[column], "{column}");
    }
    // Nobody tells how much it holds, so it is what is live.
    assert_eq!(theirs["peak_reserved_bytes"], theirs["peak_allocated_bytes"]);
}

#[test]
fn a_plugin_that_tells_what_it_holds_is_believed() {
    let Some(workshop) = Workshop::open() else { return };
    let row = workshop.replay("streams", &plugin(&workshop.allocator("STRICT")), &[]);
    assert_eq!(row["status"], "completed", "{row}");
    let (reserved, allocated) =
        (row["peak_reserved_bytes"].as_u64().unwrap(), row["peak_allocated_bytes"].as_u64().unwrap());
    assert!(reserved > allocated && reserved % (2 << 20) == 0, "{row}");
}

#[test]
fn a_plugin_that_tells_what_it_holds_is_held_to_the_limit() {
    let Some(workshop) = Workshop::open() else { return };
    let library = plugin(&workshop.allocator("STRICT"));
    let limited = |limit: u64| workshop.replay("training", &library, &["--limit", &limit.to_string()]);
    let needed = workshop.replay("training", &library, &[])["peak_reserved_bytes"].as_u64().unwrap();
    assert_eq!(limited(needed)["status"], "completed");
    let row = limited(needed - 1);
    assert_eq!((&row["status"], &row["oom_refused_by"]), (&"oom".into(), &"limit".into()), "{row}");
    assert!(row["peak_reserved_bytes"].as_u64().unwrap() < needed, "{row}");
    assert!(row["oom_free_bytes"].as_u64().unwrap() < needed, "what it holds is not free: {row}");
}

#[test]
fn a_plugin_that_can_be_told_the_limit_is_told() {
    let Some(workshop) = Workshop::open() else { return };
    let library = plugin(&workshop.allocator("TOLD_THE_LIMIT"));
    let needed = workshop.replay("training", &library, &[])["peak_reserved_bytes"].as_u64().unwrap();
    let limited = |limit: u64| workshop.replay("training", &library, &["--limit", &limit.to_string()]);
    // It takes half of what it is told.
    assert_eq!(limited(needed * 2)["status"], "completed");
    let row = limited(needed * 2 - 2);
    assert_eq!((&row["status"], &row["oom_refused_by"]), (&"oom".into(), &"device".into()), "{row}");
}

#[test]
fn unknown_plugin_memory_is_blank() {
    let Some(workshop) = Workshop::open() else { return };
    let context = workshop.replay("streams", "null", &[])["peak_device_used_bytes"].as_u64().unwrap();
    let row = workshop.replay("streams", &plugin(&workshop.allocator("STRICT")), &[]);
    let [used, reserved] =
        ["peak_device_used_bytes", "peak_reserved_bytes"].map(|column| row[column].as_u64().unwrap());
    assert_eq!(used, context + reserved);

    let silent = plugin(&workshop.allocator("WELL_BEHAVED"));
    let row = workshop.replay("streams", &silent, &[]);
    assert!(row["peak_device_used_bytes"].is_null() && row["final_device_used_bytes"].is_null(), "{row}");
    let output = workshop.oomph(&["replay", "streams", "--strategy", &silent, "--format", "markdown"]);
    let table = String::from_utf8_lossy(&output.stdout);
    let line = table.lines().find(|line| line.contains("plugin:")).unwrap();
    assert_eq!(line.split('|').nth(5).map(str::trim), Some(""), "{table}");
}

#[test]
fn null_is_out_of_memory() {
    let Some(workshop) = Workshop::open() else { return };
    let row = workshop.replay("training", &plugin(&workshop.allocator("RUNNING_OUT")), &[]);
    assert_eq!((row["status"].as_str(), row["allocs"].as_u64()), (Some("oom"), Some(20)), "{row}");
}

#[test]
fn aborting_plugin_fails_its_case_only() {
    let Some(workshop) = Workshop::open() else { return };
    let row = workshop.replay("training", &plugin(&workshop.allocator("ABORTING")), &[]);
    assert_eq!(row["status"], "error", "{row}");
    let reason = row["reason"].as_str().unwrap();
    assert!(reason.starts_with("plugin ") && reason.contains("aborting.so: alloc of "), "{reason}");
    let words = " bytes: the worker process was ended by SIGABRT, an abort; last output: my pool is corrupt";
    assert!(reason.ends_with(words), "{reason}");
}

#[test]
fn an_exception_costs_the_case_and_is_told() {
    let Some(workshop) = Workshop::open() else { return };
    let library = workshop.0.path().join("thrower.so");
    workshop.compile(&["-shared", "-fPIC", "-lstdc++"], "thrower.cpp", &library);
    let row = workshop.replay("training", &plugin(&library), &[]);
    assert_eq!(row["status"], "error", "{row}");
    let reason = row["reason"].as_str().unwrap();
    assert!(reason.contains("SIGABRT") && reason.ends_with("what(): std::bad_alloc"), "{reason}");
}

#[test]
fn plugin_symbols_can_be_named() {
    let Some(workshop) = Workshop::open() else { return };
    let library = plugin(&workshop.allocator("OTHER_NAMES"));
    let row = workshop.replay("checkerboard", &format!("{library},alloc:borrow_alloc,free:borrow_free"), &[]);
    assert_eq!(row["status"], "completed", "{row}");
    for (strategy, words) in [
        (library.clone(), "my_malloc/my_free, allocate/deallocate, alloc/free, oomph_alloc/oomph_free"),
        (library.clone(), "(it has borrow_alloc, borrow_free)"),
        (format!("{library},alloc:borow_alloc,free:borrow_free"), "did you mean 'borrow_alloc'?"),
        (plugin(&workshop.allocator("HALF_A_PAIR")), "(it has alloc)"),
        ("plugin:nowhere.so".to_owned(), "nowhere.so: No such file"),
        (format!("plugin:{}", env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml"), "not a 64-bit ELF"),
    ] {
        let output = workshop.oomph(&["replay", "checkerboard", "--strategy", &strategy]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(words) && output.status.code() == Some(2), "{strategy}: {said}");
    }
}

#[test]
fn suite_survives_plugins() {
    let Some(workshop) = Workshop::open() else { return };
    let specs = ["WELL_BEHAVED", "ABORTING", "RUNNING_OUT"].map(|which| plugin(&workshop.allocator(which)));
    let strategies: Vec<String> = specs.iter().map(|spec| format!("'{spec}'")).collect();
    let text = format!(
        "question = 'which?'\n[[group]]\nworkloads = ['training']\nstrategies = ['caching', {}]\n",
        strategies.join(", ")
    );
    std::fs::write(workshop.0.path().join("mixed.toml"), text).unwrap();
    let output = workshop.oomph(&["run", "mixed.toml", "--format", "csv"]);
    let table = String::from_utf8_lossy(&output.stdout);
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let place = reader.headers().unwrap().iter().position(|column| column == "status").unwrap();
    let statuses: Vec<String> = reader.records().map(|row| row.unwrap()[place].to_owned()).collect();
    assert_eq!(statuses, ["completed", "completed", "error", "oom"], "{table}");
}

#[test]
fn other_streams_are_waited_for_unless_the_plugin_does() {
    let Some(workshop) = Workshop::open() else { return };
    let waiting = workshop.replay("streams", &plugin(&workshop.allocator("WELL_BEHAVED")), &[]);
    let told = workshop.replay("streams", &plugin(&workshop.allocator("TOLD_OF_STREAMS")), &[]);
    let calls = |row: &serde_json::Value| row["driver_calls"].as_u64().unwrap();
    assert!(calls(&waiting) > calls(&told), "{waiting}\n{told}");
}

#[test]
fn stress_tells_good_plugins_from_bad() {
    let Some(workshop) = Workshop::open() else { return };
    let stress = |which: &str| {
        let library = plugin(&workshop.allocator(which));
        let output = workshop.oomph(&["stress", "properties", "--strategy", &library, "--cases", "20"]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    for good in ["WELL_BEHAVED", "STRICT", "TOLD_OF_STREAMS"] {
        let (code, said, complaints) = stress(good);
        assert_eq!(code, Some(0), "{good}: {said} {complaints}");
    }
    let (code, said, _) = stress("OVERLAPPING");
    assert!(code == Some(106) && said.contains("overlap"), "{said}");
    assert!(said.contains("oomph stress properties --trace"), "{said}");
    let (code, said, _) = stress("RUNNING_OUT");
    assert!(code == Some(106) && said.contains("cannot be allocated although nothing is in use"), "{said}");
    let (code, said, _) = stress("ABORTING");
    assert!(code == Some(106) && said.contains("was ended by SIGABRT, an abort; its last"), "{said}");
}

#[test]
fn commands_that_cap_or_compare_the_driver_refuse_a_plugin() {
    let Some(workshop) = Workshop::open() else { return };
    let library = plugin(&workshop.allocator("WELL_BEHAVED"));
    let output = workshop.oomph(&["threshold", "checkerboard", "--strategy", &library]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("its memory cannot be limited"), "{output:?}");
}

#[test]
fn our_library_behind_our_loader_is_the_strategy_itself() {
    let Some(workshop) = Workshop::open() else { return };
    for strategy in ["caching", "caching:expandable_segments:True", "pool", "oomph"] {
        let through = |who: &str| {
            let arguments = ["replay", "training", "--strategy", "null", "--strategy", who, "--format", "json"];
            let mut command = workshop.command(&arguments);
            command.env("OOMPH_DEVICE", "sim").env("OOMPH_STRATEGY", strategy);
            let document: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
            document["rows"][1].clone()
        };
        let (direct, plugged) = (through(strategy), through(&plugin(&library::liboomph())));
        for column in ["status", "events", "allocs", "peak_reserved_bytes", "final_reserved_bytes"] {
            assert_eq!(plugged[column], direct[column], "{strategy}: {column}");
        }
    }
}
