//! Checks which module of the root package imports which, as ARCHITECTURE.md says. Cargo checks the other crates.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Every module, and the modules it may import besides itself and the other crates.
const ARROWS: &[(&str, &[&str])] = &[
    ("replay", &[]),
    ("rehearse", &[]),
    ("measure", &["replay"]),
    ("suite", &["measure", "replay"]),
    ("answer", &["suite", "measure", "replay"]),
    ("stress", &["measure", "replay"]),
    ("report", &["answer", "rehearse", "stress", "measure", "replay"]),
    ("cli", &["answer", "rehearse", "report", "suite", "stress", "measure", "replay"]),
];

#[test]
fn modules_import_only_what_is_allowed() {
    let mut violations = Vec::new();
    for (module, allowed) in ARROWS {
        for file in rust_files(&Path::new("src").join(module)) {
            let text = fs::read_to_string(&file).unwrap();
            for used in modules_used(production_code(&text)) {
                if used != *module && !allowed.contains(&used.as_str()) {
                    violations.push(format!("{}: {module} may not use {used}", file.display()));
                }
            }
        }
    }
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn every_module_is_in_the_table() {
    let mut modules: Vec<String> = fs::read_dir("src")
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    modules.sort();
    let mut listed: Vec<String> = ARROWS.iter().map(|(module, _)| (*module).to_owned()).collect();
    listed.sort();
    assert_eq!(modules, listed);
}

#[test]
fn nested_and_inline_imports_are_found() {
    let text = "use crate::{\n    measure::{Peaks, Steps},\n    suite::Case,\n};\nuse crate::answer::Advice;\nfn f() { crate::replay::replay(); }";
    let seen: Vec<String> = modules_used(text).into_iter().collect();
    assert_eq!(seen, ["answer", "measure", "replay", "suite"]);
}

/// The part of a file that is compiled into the library. Tests may use any module, because they
/// test combinations.
fn production_code(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text)
}

/// The modules named after `crate::`, directly or in a braced list.
fn modules_used(text: &str) -> BTreeSet<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut modules = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(list) => {
                let (mut depth, mut word, mut expecting) = (1, String::new(), true);
                for c in list.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        ',' if depth == 1 => expecting = true,
                        c if depth == 1 && expecting && (c.is_alphanumeric() || c == '_') => word.push(c),
                        _ if !word.is_empty() => expecting = false,
                        _ => {}
                    }
                    if (!expecting || depth == 0) && !word.is_empty() {
                        modules.insert(std::mem::take(&mut word));
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
            None => {
                modules.insert(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
            }
        }
    }
    modules.retain(|name| ARROWS.iter().any(|(module, _)| module == name));
    modules
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}
