//! Writes reproducible ustar archives: no times, no owners.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail};

/// Builds a tar archive in memory.
#[derive(Default)]
pub struct TarBuilder {
    bytes: Vec<u8>,
    directories: BTreeSet<String>,
}

impl TarBuilder {
    /// Adds a directory, unless it was added before: CRI-O rejects a layer with the same path twice.
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        let path = format!("{}/", path.trim_end_matches('/'));
        if !self.directories.insert(path.clone()) {
            return Ok(());
        }
        self.header(&path, mode, 0, b'5', "")
    }

    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.header(path, mode, content.len(), b'0', "")?;
        self.bytes.extend_from_slice(content);
        self.pad();
        Ok(())
    }

    pub fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        self.header(path, 0o777, 0, b'2', target)
    }

    /// The archive with its end-of-archive blocks.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.extend([0; 1024]);
        self.bytes
    }

    fn pad(&mut self) {
        let partial = self.bytes.len() % 512;
        if partial > 0 {
            self.bytes.resize(self.bytes.len() + 512 - partial, 0);
        }
    }

    fn header(&mut self, path: &str, mode: u32, size: usize, kind: u8, target: &str) -> Result<()> {
        let mut header = [0_u8; 512];
        let mut field = |at: usize, width: usize, text: &str| -> Result<()> {
            if text.len() > width {
                bail!("{text:?} does not fit its field of {width} bytes");
            }
            header[at..at + text.len()].copy_from_slice(text.as_bytes());
            Ok(())
        };
        field(0, 100, path).context("tar path")?;
        field(100, 8, &format!("{mode:07o}"))?;
        field(108, 8, "0000000")?;
        field(116, 8, "0000000")?;
        field(124, 12, &format!("{size:011o}"))?;
        field(136, 12, "00000000000")?;
        field(148, 8, "        ")?;
        field(157, 100, target).context("tar link target")?;
        field(257, 8, "ustar\x0000")?;
        header[156] = kind;
        let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        self.bytes.extend_from_slice(&header);
        Ok(())
    }
}
