//! Checks the dependencies between the crates of the workspace against ARCHITECTURE.md.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use serde_json::Value;

/// The crates that each crate may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("api", &[]),
    ("plan", &["api"]),
    ("link", &["api", "plan"]),
    ("client", &["api"]),
    ("controller", &["api", "client", "plan"]),
    ("wire", &[]),
    ("cni", &["wire"]),
    ("node", &["api", "client", "plan", "link", "wire"]),
    ("patchbay", &["api", "client", "controller", "node"]),
    ("lab", &[]),
    ("e2e", &["api", "plan", "wire", "node", "lab"]),
];

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .current_dir(e2e::repository())
        .output()
        .expect("cargo metadata");
    serde_json::from_slice(&output.stdout).expect("JSON of cargo metadata")
}

fn packages() -> BTreeMap<String, Vec<Value>> {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().expect("packages").clone();
    packages
        .into_iter()
        .map(|p| {
            (
                p["name"].as_str().expect("package name").to_owned(),
                p["dependencies"].as_array().expect("list of dependencies").clone(),
            )
        })
        .collect()
}

fn workspace_dependencies(dependencies: &[Value], crates: &BTreeSet<String>) -> BTreeSet<String> {
    let normal = dependencies.iter().filter(|d| d["kind"].as_str() != Some("dev"));
    normal.filter_map(|d| d["name"].as_str().map(str::to_owned)).filter(|n| crates.contains(n)).collect()
}

#[test]
fn every_crate_depends_only_on_the_allowed_crates() {
    let packages = packages();
    let crates: BTreeSet<String> = packages.keys().cloned().collect();
    let listed: BTreeSet<String> = ALLOWED.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(crates, listed, "ALLOWED does not list exactly the crates of the workspace");
    for (name, allowed) in ALLOWED {
        let allowed: BTreeSet<String> = allowed.iter().map(ToString::to_string).collect();
        let used = workspace_dependencies(&packages[*name], &crates);
        let forbidden: Vec<_> = used.difference(&allowed).collect();
        assert!(forbidden.is_empty(), "{name} must not depend on {forbidden:?}");
    }
}

#[test]
fn only_tests_depend_on_the_lab() {
    for (name, dependencies) in packages() {
        let uses = dependencies.iter().any(|d| d["name"] == "lab" && d["kind"].as_str() != Some("dev"));
        assert!(!uses || name == "e2e", "{name} must not depend on lab");
    }
}

/// The libraries that a crate is built with, with only its own features.
fn dependency_tree(package: &str) -> String {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "-p", package, "--edges=normal", "--prefix=none", "--format={lib}"])
        .current_dir(e2e::repository())
        .output()
        .expect("cargo tree");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn planning_and_kernel_code_build_without_kubernetes_clients_and_async_runtimes() {
    for (package, forbidden) in [
        ("plan", &["kube", "tokio", "k8s_openapi", "nix"][..]),
        ("link", &["kube", "k8s_openapi"]),
        ("api", &["kube", "tokio"]),
        ("cni", &["kube", "tokio", "serde", "nix", "clap"]),
    ] {
        let tree = dependency_tree(package);
        for crate_ in forbidden {
            assert!(
                !tree.lines().any(|line| line.trim() == *crate_),
                "{package} must not depend on {crate_}"
            );
        }
    }
}

#[test]
fn versions_and_lints_are_set_only_in_the_workspace() {
    let root = e2e::repository();
    let members =
        std::fs::read_dir(root.join("crates")).unwrap().flatten().map(|e| e.path().join("Cargo.toml"));
    for manifest in members.chain([root.join("tests/Cargo.toml")]) {
        let text = std::fs::read_to_string(&manifest).unwrap();
        let name = manifest.display();
        assert!(text.contains("[lints]\nworkspace = true"), "{name} must inherit the lints of the workspace");
        let mut section = "";
        for line in text.lines() {
            if line.starts_with('[') {
                section = line;
            }
            let dependency = section.contains("dependencies") && line.contains('=') && !line.starts_with('#');
            assert!(
                !dependency || line.contains("workspace = true"),
                "{name}: {line}: set the version in the workspace"
            );
        }
    }
}
