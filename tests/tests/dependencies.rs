//! The rooms of the workspace and the arrows between them, as ARCHITECTURE.md draws them.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use serde_json::Value;

/// Who may use whom; nobody else may.
const ARROWS: &[(&str, &[&str])] = &[
    ("api", &[]),
    ("plan", &["api"]),
    ("link", &["api", "plan"]),
    ("controller", &["api", "plan"]),
    ("wire", &[]),
    ("cni", &["wire"]),
    ("node", &["api", "plan", "link", "wire"]),
    ("patchbay", &["api", "controller", "node"]),
    ("lab", &[]),
    ("e2e", &["api", "plan", "wire", "node", "lab"]),
];

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .current_dir(e2e::repository())
        .output()
        .expect("cargo metadata");
    serde_json::from_slice(&output.stdout).expect("cargo's JSON")
}

fn packages() -> BTreeMap<String, Vec<Value>> {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().expect("packages").clone();
    packages
        .into_iter()
        .map(|p| {
            (
                p["name"].as_str().expect("a name").to_owned(),
                p["dependencies"].as_array().expect("a list").clone(),
            )
        })
        .collect()
}

fn used(dependencies: &[Value], rooms: &BTreeSet<String>) -> BTreeSet<String> {
    let normal = dependencies.iter().filter(|d| d["kind"].as_str() != Some("dev"));
    normal.filter_map(|d| d["name"].as_str().map(str::to_owned)).filter(|n| rooms.contains(n)).collect()
}

#[test]
fn every_room_uses_only_the_rooms_that_it_may() {
    let packages = packages();
    let rooms: BTreeSet<String> = packages.keys().cloned().collect();
    let drawn: BTreeSet<String> = ARROWS.iter().map(|(room, _)| (*room).to_owned()).collect();
    assert_eq!(rooms, drawn, "a room is missing in the drawing, or the drawing has one too many");
    for (room, allowed) in ARROWS {
        let allowed: BTreeSet<String> = allowed.iter().map(ToString::to_string).collect();
        let used = used(&packages[*room], &rooms);
        let wrong: Vec<_> = used.difference(&allowed).collect();
        assert!(wrong.is_empty(), "{room} must not use {wrong:?}");
    }
}

#[test]
fn the_lab_is_a_dependency_of_tests_alone() {
    for (room, dependencies) in packages() {
        let uses = dependencies.iter().any(|d| d["name"] == "lab" && d["kind"].as_str() != Some("dev"));
        assert!(!uses || room == "e2e", "{room} ships the lab");
    }
}

/// Everything a room is built with, its own features only.
fn graph(room: &str) -> String {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "-p", room, "--edges=normal", "--prefix=none", "--format={lib}"])
        .current_dir(e2e::repository())
        .output()
        .expect("cargo tree");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn rules_and_kernel_code_build_without_kubernetes_and_without_a_runtime_of_their_own() {
    for (room, forbidden) in [
        ("plan", &["kube", "tokio", "k8s_openapi", "nix"][..]),
        ("link", &["kube", "k8s_openapi"]),
        ("api", &["kube", "tokio"]),
        ("cni", &["kube", "tokio", "serde", "nix", "clap"]),
    ] {
        let graph = graph(room);
        for crate_ in forbidden {
            assert!(!graph.lines().any(|line| line.trim() == *crate_), "{room} is built with {crate_}");
        }
    }
}

#[test]
fn versions_and_lints_stand_in_the_workspace_alone() {
    let root = e2e::repository();
    let members =
        std::fs::read_dir(root.join("crates")).unwrap().flatten().map(|e| e.path().join("Cargo.toml"));
    for manifest in members.chain([root.join("tests/Cargo.toml")]) {
        let text = std::fs::read_to_string(&manifest).unwrap();
        let name = manifest.display();
        assert!(text.contains("[lints]\nworkspace = true"), "{name} has lints of its own");
        let mut section = "";
        for line in text.lines() {
            if line.starts_with('[') {
                section = line;
            }
            let dependency = section.contains("dependencies") && line.contains('=') && !line.starts_with('#');
            assert!(
                !dependency || line.contains("workspace = true"),
                "{name}: {line}: versions go to the workspace"
            );
        }
    }
}
