//! A 64-bit digest of text that is the same in every version and on every machine.
//!
//! Link names and ownership MAC addresses are derived from it, so it must never change. It is not cryptographic: an
//! attacker can construct two texts with the same digest.

/// The digest of a sequence of texts. The boundaries between the texts count.
pub fn digest<'a>(texts: impl IntoIterator<Item = &'a str>) -> u64 {
    // FNV-1a, then the finalizer of MurmurHash3: FNV alone distributes the high bits poorly.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for text in texts {
        // 0xff never occurs in UTF-8, so it is an unambiguous separator.
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
    fn the_digest_is_stable() {
        assert_eq!(digest([]), 0xefd0_1f60_ba99_2926);
        assert_eq!(digest(["blue"]), digest(["blue"]));
    }

    #[test]
    fn text_boundaries_change_the_digest() {
        let all = [digest(["ab", "c"]), digest(["a", "bc"]), digest(["abc"]), digest(["abc", ""])];
        assert_eq!(BTreeSet::from(all).len(), all.len());
    }
}
