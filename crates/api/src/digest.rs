//! A short digest of text, the same in every version of the program and on every machine.
//!
//! Names and marks on links are derived with it, and what was derived yesterday must be recognised tomorrow. It keeps
//! apart what people choose; it is no defence against somebody who looks for two texts with one digest.

/// The digest of several texts, each kept apart from the next.
pub fn digest<'a>(texts: impl IntoIterator<Item = &'a str>) -> u64 {
    // FNV-1a, then the finalizer of MurmurHash3, because FNV alone changes its high bits too little.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for text in texts {
        // No UTF-8 text holds 0xff, so it ends a text unmistakably.
        for byte in text.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_digest_never_changes() {
        assert_eq!(digest([]), 0xefd0_1f60_ba99_2926);
        assert_eq!(digest(["blue"]), digest(["blue"]));
    }

    #[test]
    fn texts_are_kept_apart() {
        let all = [digest(["ab", "c"]), digest(["a", "bc"]), digest(["abc"]), digest(["abc", ""])];
        assert_eq!(BTreeSet::from(all).len(), all.len());
    }
}
