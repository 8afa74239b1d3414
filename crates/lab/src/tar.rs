//! Tar archives, as plain as image tools want them. Reproducible: no times, no owners.

use anyhow::{Context as _, Result, bail};

/// Builds an archive in memory.
#[derive(Default)]
pub struct TarBuilder {
    bytes: Vec<u8>,
}

impl TarBuilder {
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        self.header(&format!("{}/", path.trim_end_matches('/')), mode, 0, b'5', "")
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

    /// The whole archive, closed.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.extend([0; 1024]);
        self.bytes
    }

    fn pad(&mut self) {
        let rest = self.bytes.len() % 512;
        if rest > 0 {
            self.bytes.resize(self.bytes.len() + 512 - rest, 0);
        }
    }

    fn header(&mut self, path: &str, mode: u32, size: usize, kind: u8, target: &str) -> Result<()> {
        let mut header = [0_u8; 512];
        let mut put = |at: usize, room: usize, text: &str| -> Result<()> {
            if text.len() > room {
                bail!("{text:?} is longer than the {room} bytes of its field");
            }
            header[at..at + text.len()].copy_from_slice(text.as_bytes());
            Ok(())
        };
        put(0, 100, path).context("tar path")?;
        put(100, 8, &format!("{mode:07o}"))?;
        put(108, 8, "0000000")?;
        put(116, 8, "0000000")?;
        put(124, 12, &format!("{size:011o}"))?;
        put(136, 12, "00000000000")?;
        put(148, 8, "        ")?;
        put(157, 100, target).context("tar link target")?;
        put(257, 8, "ustar\x0000")?;
        header[156] = kind;
        let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        self.bytes.extend_from_slice(&header);
        Ok(())
    }
}
