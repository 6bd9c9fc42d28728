//! `oomph record`: its output is valid Python.

use std::process::Command;

use assert_cmd::cargo::cargo_bin_cmd;

#[test]
fn python_understands_every_script() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return;
    }
    for when in ["exit", "oom"] {
        for more in [&[][..], &["--last", "1000"], &["--no-stacks"], &["--torch", "2.0"], &["--name", "a b"]] {
            let printed = cargo_bin_cmd!("oomph").args(["record", "--when", when]).args(more).output().unwrap();
            assert!(printed.status.success());
            let script = String::from_utf8(printed.stdout).unwrap();
            let parsed =
                Command::new("python3").args(["-c", "import ast, sys; ast.parse(sys.argv[1])", &script]).output();
            let parsed = parsed.unwrap();
            assert!(parsed.status.success(), "{script}\n{}", String::from_utf8_lossy(&parsed.stderr));
        }
    }
}

#[test]
fn pytorch_without_history_is_refused() {
    let refused = cargo_bin_cmd!("oomph").args(["record", "--torch", "1.9"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("PyTorch before 2.0 cannot record a history"));
}

#[test]
fn a_program_is_recorded_by_the_package() {
    for program in [&["train.py", "--lr", "1"][..], &["-m", "package.train", "--lr", "1"]] {
        let refused = cargo_bin_cmd!("oomph").arg("record").args(program).output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(said.contains(&format!("python -m oomph record {} (", program.join(" "))), "{said}");
    }
}

#[test]
fn every_rank_writes_its_own_file() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return;
    }
    // A stub of the parts of PyTorch that the recorded lines use.
    let torch = "import sys, types\n\
                 memory = types.SimpleNamespace(_record_memory_history=lambda **_: None, _snapshot=dict)\n\
                 sys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace(memory=memory))\n";
    let printed = cargo_bin_cmd!("oomph").arg("record").output().unwrap();
    let script = format!("{torch}{}rank = 'mine'\n", String::from_utf8_lossy(&printed.stdout));
    let folder = tempfile::tempdir().unwrap();
    let names = ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"];
    for (known, file) in [
        (&[][..], "run-0.pickle"),
        (&[("RANK", "3"), ("SLURM_PROCID", "0")], "run-3.pickle"),
        (&[("SLURM_PROCID", "12")], "run-12.pickle"),
        (&[("OMPI_COMM_WORLD_RANK", "5")], "run-5.pickle"),
        (&[("PMI_RANK", "7")], "run-7.pickle"),
    ] {
        let mut python = Command::new("python3");
        python.current_dir(folder.path()).args(["-c", &script]);
        for name in names {
            python.env_remove(name);
        }
        let ended = python.envs(known.iter().copied()).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        assert!(folder.path().join(file).is_file(), "{known:?}");
    }
}
