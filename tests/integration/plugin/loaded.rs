//! Cases whose allocator is a plugin file.

use serde_json::Value;

use super::{PluginFixture, library, plugin};

#[test]
fn plugin_replays_like_any_strategy() {
    let Some(fixture) = PluginFixture::open() else { return };
    let theirs = fixture.replay("training", &plugin(&fixture.allocator("WELL_BEHAVED")), &[]);
    let ours = fixture.replay("training", "null", &[]);
    assert_eq!(theirs["status"], "completed", "{theirs}");
    for column in ["events", "allocs", "frees", "peak_requested_bytes"] {
        assert_eq!(theirs[column], ours[column], "{column}");
    }
    // The plugin makes addresses up and does not report what it holds.
    for unknown in ["peak_reserved_bytes", "fragmentation_share", "driver_calls", "segments"] {
        assert!(theirs[unknown].is_null(), "{unknown}: {theirs}");
    }
}

#[test]
fn reported_reserved_bytes_are_used() {
    let Some(fixture) = PluginFixture::open() else { return };
    let row = fixture.replay("streams", &plugin(&fixture.allocator("STRICT")), &[]);
    assert_eq!(row["status"], "completed", "{row}");
    let (reserved, allocated) =
        (row["peak_reserved_bytes"].as_u64().unwrap(), row["peak_allocated_bytes"].as_u64().unwrap());
    assert!(reserved > allocated && reserved % (2 << 20) == 0, "{row}");
}

#[test]
fn plugin_with_reserved_bytes_obeys_the_limit() {
    let Some(fixture) = PluginFixture::open() else { return };
    let library = plugin(&fixture.allocator("STRICT"));
    let limited = |limit: u64| fixture.replay("training", &library, &["--limit", &limit.to_string()]);
    let needed = fixture.replay("training", &library, &[])["peak_reserved_bytes"].as_u64().unwrap();
    assert_eq!(limited(needed)["status"], "completed");
    let row = limited(needed - 1);
    assert_eq!((&row["status"], &row["oom_refused_by"]), (&"oom".into(), &"limit".into()), "{row}");
    assert!(row["peak_reserved_bytes"].as_u64().unwrap() < needed, "{row}");
    assert!(row["oom_free_bytes"].as_u64().unwrap() < needed, "what it holds is not free: {row}");
}

#[test]
fn plugin_limit_function_gets_the_limit() {
    let Some(fixture) = PluginFixture::open() else { return };
    let library = plugin(&fixture.allocator("LIMIT_AWARE"));
    let needed = fixture.replay("training", &library, &[])["peak_reserved_bytes"].as_u64().unwrap();
    let limited = |limit: u64| fixture.replay("training", &library, &["--limit", &limit.to_string()]);
    // It uses half of the limit it gets.
    assert_eq!(limited(needed * 2)["status"], "completed");
    let row = limited(needed * 2 - 2);
    assert_eq!((&row["status"], &row["oom_refused_by"]), (&"oom".into(), &"device".into()), "{row}");
}

#[test]
fn unknown_plugin_memory_is_blank() {
    let Some(fixture) = PluginFixture::open() else { return };
    let context = fixture.replay("streams", "null", &[])["peak_device_used_bytes"].as_u64().unwrap();
    let row = fixture.replay("streams", &plugin(&fixture.allocator("STRICT")), &[]);
    let [used, reserved] =
        ["peak_device_used_bytes", "peak_reserved_bytes"].map(|column| row[column].as_u64().unwrap());
    assert_eq!(used, context + reserved);

    let silent = plugin(&fixture.allocator("WELL_BEHAVED"));
    let row = fixture.replay("streams", &silent, &[]);
    assert!(row["peak_device_used_bytes"].is_null() && row["final_device_used_bytes"].is_null(), "{row}");
    let output = fixture.oomph(&["replay", "streams", "--strategy", &silent, "--format", "markdown"]);
    let table = String::from_utf8_lossy(&output.stdout);
    let line = table.lines().find(|line| line.contains("plugin:")).unwrap();
    assert_eq!(line.split('|').nth(5).map(str::trim), Some(""), "{table}");
}

#[test]
fn null_is_out_of_memory() {
    let Some(fixture) = PluginFixture::open() else { return };
    let row = fixture.replay("training", &plugin(&fixture.allocator("RUNNING_OUT")), &[]);
    assert_eq!((row["status"].as_str(), row["allocs"].as_u64()), (Some("oom"), Some(20)), "{row}");
}

#[test]
fn aborting_plugin_fails_its_case_only() {
    let Some(fixture) = PluginFixture::open() else { return };
    let row = fixture.replay("training", &plugin(&fixture.allocator("ABORTING")), &[]);
    assert_eq!(row["status"], "error", "{row}");
    let reason = row["reason"].as_str().unwrap();
    assert!(reason.starts_with("plugin ") && reason.contains("aborting.so: alloc of "), "{reason}");
    let words = " bytes: the worker process was ended by SIGABRT, an abort; last output: my pool is corrupt";
    assert!(reason.ends_with(words), "{reason}");
}

#[test]
fn exception_fails_the_case_with_its_message() {
    let Some(fixture) = PluginFixture::open() else { return };
    let library = fixture.0.path().join("thrower.so");
    fixture.compile(&["-shared", "-fPIC", "-lstdc++"], "thrower.cpp", &library);
    let row = fixture.replay("training", &plugin(&library), &[]);
    assert_eq!(row["status"], "error", "{row}");
    let reason = row["reason"].as_str().unwrap();
    assert!(reason.contains("SIGABRT") && reason.ends_with("what(): std::bad_alloc"), "{reason}");
}

#[test]
fn plugin_symbols_can_be_named() {
    let Some(fixture) = PluginFixture::open() else { return };
    let library = plugin(&fixture.allocator("OTHER_NAMES"));
    let row = fixture.replay("checkerboard", &format!("{library},alloc:borrow_alloc,free:borrow_free"), &[]);
    assert_eq!(row["status"], "completed", "{row}");
    for (strategy, words) in [
        (library.clone(), "my_malloc/my_free, allocate/deallocate, alloc/free, oomph_alloc/oomph_free"),
        (library.clone(), "(it has borrow_alloc, borrow_free)"),
        (format!("{library},alloc:borow_alloc,free:borrow_free"), "did you mean 'borrow_alloc'?"),
        (plugin(&fixture.allocator("HALF_A_PAIR")), "(it has alloc)"),
        ("plugin:nowhere.so".to_owned(), "nowhere.so: No such file"),
        (format!("plugin:{}", env!("CARGO_MANIFEST_DIR").to_owned() + "/Cargo.toml"), "not a 64-bit ELF"),
    ] {
        let output = fixture.oomph(&["replay", "checkerboard", "--strategy", &strategy]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(words) && output.status.code() == Some(2), "{strategy}: {said}");
    }
}

#[test]
fn suite_survives_plugins() {
    let Some(fixture) = PluginFixture::open() else { return };
    let specs = ["WELL_BEHAVED", "ABORTING", "RUNNING_OUT"].map(|which| plugin(&fixture.allocator(which)));
    let strategies: Vec<String> = specs.iter().map(|spec| format!("'{spec}'")).collect();
    let text = format!(
        "question = 'which?'\n[[group]]\nworkloads = ['training']\nstrategies = ['caching', {}]\n",
        strategies.join(", ")
    );
    std::fs::write(fixture.0.path().join("mixed.toml"), text).unwrap();
    let output = fixture.oomph(&["run", "mixed.toml", "--format", "csv"]);
    let table = String::from_utf8_lossy(&output.stdout);
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let place = reader.headers().unwrap().iter().position(|column| column == "status").unwrap();
    let statuses: Vec<String> = reader.records().map(|row| row.unwrap()[place].to_owned()).collect();
    assert_eq!(statuses, ["completed", "completed", "error", "oom"], "{table}");
}

#[test]
fn streams_are_waited_for_unless_plugin_does() {
    let Some(fixture) = PluginFixture::open() else { return };
    let waiting = fixture.replay("streams", &plugin(&fixture.allocator("WELL_BEHAVED")), &[]);
    let stream_aware = fixture.replay("streams", &plugin(&fixture.allocator("STREAM_AWARE")), &[]);
    let calls = |row: &serde_json::Value| row["driver_event_calls"].as_u64().unwrap();
    assert!(calls(&waiting) > calls(&stream_aware), "{waiting}\n{stream_aware}");
}

#[test]
fn stress_tells_good_plugins_from_bad() {
    let Some(fixture) = PluginFixture::open() else { return };
    let stress = |which: &str| {
        let library = plugin(&fixture.allocator(which));
        let output = fixture.oomph(&["stress", "properties", "--strategy", &library, "--cases", "20"]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    for good in ["WELL_BEHAVED", "STRICT", "STREAM_AWARE"] {
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
fn driver_limiting_commands_refuse_plugins() {
    let Some(fixture) = PluginFixture::open() else { return };
    let library = plugin(&fixture.allocator("WELL_BEHAVED"));
    let output = fixture.oomph(&["threshold", "checkerboard", "--strategy", &library]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("its memory cannot be limited"), "{output:?}");
}

#[test]
fn own_library_as_plugin_equals_the_strategy() {
    let Some(fixture) = PluginFixture::open() else { return };
    for strategy in ["caching", "caching:expandable_segments:True", "pool", "oomph"] {
        let through = |who: &str| {
            let arguments = ["replay", "training", "--strategy", "null", "--strategy", who, "--format", "json"];
            let mut command = fixture.command(&arguments);
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
