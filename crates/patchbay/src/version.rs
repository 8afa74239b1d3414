//! Version, commit and compiler of this binary.

/// The released version.
pub const VERSION: &str = concat!("v", env!("CARGO_PKG_VERSION"));
/// The commit, `-dirty` when the sources differed from it, or `unknown`.
pub const COMMIT: &str = env!("PATCHBAY_COMMIT");
/// The compiler and the target.
const BUILT_WITH: &str = env!("PATCHBAY_BUILT_WITH");

/// The output of `patchbay version`.
pub fn text() -> String {
    format!("patchbay {VERSION}\ncommit {COMMIT}\nbuilt with {BUILT_WITH}\n")
}
