//! How much room the index of users takes, in a process of its own.

use api::selection::MAX_NAD_REFS;
use plan::users::{Facts, Index, Kind};

const OBJECTS: usize = 2000;
/// What one reference may cost that somebody made up, in bytes.
const MOST: usize = 450;

/// The memory that this process has in use, in bytes.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches(" kB").parse::<usize>().ok().map(|kib| kib * 1024)
}

#[test]
fn a_reference_that_somebody_made_up_takes_little_room() {
    let mut index = Index::default();
    let before = resident().unwrap();
    for object in 0..OBJECTS {
        let names: Vec<String> = (0..MAX_NAD_REFS).map(|it| format!("made-up-{object}-{it}")).collect();
        let facts = Facts {
            namespace: "home".to_owned(),
            name: format!("x{object}"),
            networks: Some(names.join(",")),
            ..Facts::default()
        };
        index.apply(Kind::Deployment, &facts);
    }
    let each = (resident().unwrap() - before) / (OBJECTS * MAX_NAD_REFS);
    assert!(each < MOST, "{each} bytes");
    assert_eq!(index.len(), OBJECTS);
}
