//! The memory of the index of users, measured in a separate process.

use plan::users::{MAX_NAD_REFS, UserIndex, WorkloadKind, WorkloadRefs};

const OBJECTS: usize = 2000;
/// The limit for one reference to a nonexistent NAD, in bytes.
const MAX_BYTES: usize = 450;

/// The resident memory of this process, in bytes.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches(" kB").parse::<usize>().ok().map(|kib| kib * 1024)
}

#[test]
fn a_reference_to_a_nonexistent_nad_takes_little_memory() {
    let mut index = UserIndex::default();
    let before = resident().unwrap();
    for object in 0..OBJECTS {
        let names: Vec<String> = (0..MAX_NAD_REFS).map(|it| format!("made-up-{object}-{it}")).collect();
        let refs = WorkloadRefs {
            namespace: "home".to_owned(),
            name: format!("x{object}"),
            networks: Some(names.join(",")),
            ..WorkloadRefs::default()
        };
        index.apply(WorkloadKind::Deployment, &refs);
    }
    let each = (resident().unwrap() - before) / (OBJECTS * MAX_NAD_REFS);
    assert!(each < MAX_BYTES, "{each} bytes");
    assert_eq!(index.len(), OBJECTS);
}
