//! `patchbay convert`: turns objects of older service controllers into NetworkServices.
//!
//! Manifests go in, manifests come out; nothing here connects to a cluster. An object that cannot be converted does not
//! affect the others.

mod draft;
mod input;
mod multus_service;
mod netservice;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs::File,
    io::{self, Read, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use draft::Draft;
use input::InputObject;
use serde_json::Value;

use crate::{cli::print, install::yaml, terminal};

/// The longest input. The output of `kubectl get` for 10,000 Services has a tenth of it.
const MAX_INPUT: u64 = 256 * 1024 * 1024;
/// How much of a text of the input is repeated in a message.
const MAX_QUOTE: usize = 80;

/// Flags of `patchbay convert`.
#[derive(Debug, clap::Args)]
pub struct ConvertArgs {
    /// The file with the objects, YAML or JSON; - reads standard input
    #[arg(long = "filename", short = 'f', value_name = "FILE")]
    file: PathBuf,

    /// The namespace of the NetworkAttachmentDefinitions that the objects name without one [default: that of the object]
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace)]
    network_namespace: Option<String>,
}

fn namespace(text: &str) -> Result<String, &'static str> {
    let valid = draft::is_dns_1123_label(text);
    valid.then(|| text.to_owned()).ok_or("must be the name of a namespace")
}

/// Prints NetworkServices to stdout, and what differs from the input to stderr.
pub fn convert(args: ConvertArgs) -> anyhow::Result<()> {
    let ConvertArgs { file, network_namespace } = args;
    let conversion = Conversion::new(&read(&file)?, network_namespace.as_deref());
    print(&conversion.output())?;
    // If stderr is closed, the exit code still reports the result.
    let _ = io::stderr().write_all(conversion.messages().as_bytes());
    match (conversion.failed, conversion.services.len()) {
        (0, 0) => bail!("found no NetService and no Service with annotation {}", multus_service::ANNOTATION),
        (0, _) => Ok(()),
        (1, _) => bail!("1 object was not converted"),
        (failed, _) => bail!("{failed} objects were not converted"),
    }
}

fn read(file: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let length = if file == Path::new("-") {
        io::stdin().take(MAX_INPUT + 1).read_to_string(&mut text).context("read standard input")?
    } else {
        let what = || format!("read {}", file.display());
        File::open(file)
            .with_context(what)?
            .take(MAX_INPUT + 1)
            .read_to_string(&mut text)
            .with_context(what)?
    };
    if length as u64 > MAX_INPUT {
        bail!("the input has more than {} MiB; convert it in parts", MAX_INPUT >> 20);
    }
    Ok(text)
}

/// The result for one input.
#[derive(Debug, Default)]
struct Conversion {
    services: Vec<Value>,
    /// Lines for the user, in the order of the input.
    lines: Vec<String>,
    /// What differs for all objects of a kind.
    general: BTreeSet<&'static str>,
    failed: usize,
    /// Namespace and name of each service.
    names: BTreeSet<(String, String)>,
    network_namespace: Option<String>,
}

impl Conversion {
    fn new(text: &str, network_namespace: Option<&str>) -> Self {
        let network_namespace = network_namespace.map(str::to_owned);
        let mut conversion = Self { network_namespace, ..Self::default() };
        for object in input::objects(text) {
            match object {
                Ok(object) => conversion.add(&object),
                Err(error) => conversion.fail(error.to_string()),
            }
        }
        conversion
    }

    fn add(&mut self, object: &InputObject) {
        let converted = if netservice::is_netservice(object) {
            netservice::convert(object)
        } else if multus_service::is_annotated(object) {
            multus_service::convert(object)
        } else {
            self.lines.push(format!("note: {} is not converted", object.title()));
            return;
        };
        match converted {
            Ok(mut draft) => {
                draft.complete_network(self.network_namespace.as_deref());
                self.push(object, draft);
            }
            Err(cause) => self.fail(format!("{}: {cause}", object.title())),
        }
    }

    fn push(&mut self, object: &InputObject, draft: Draft) {
        let key = (draft.namespace.clone().unwrap_or_default(), draft.name.clone());
        if !self.names.insert(key) {
            let title = object.title();
            return self
                .fail(format!("{title}: another object of the input becomes the same NetworkService"));
        }
        self.lines.extend(draft.notes.iter().map(|note| format!("note: {}: {note}", object.title())));
        self.services.push(draft.object());
        self.general.extend(draft.general);
    }

    fn fail(&mut self, message: String) {
        self.failed += 1;
        self.lines.push(format!("error: {message}"));
    }

    /// The NetworkServices as one YAML stream.
    fn output(&self) -> String {
        self.services.iter().map(yaml::document).collect::<Vec<_>>().join("---\n")
    }

    /// One line each, whatever the input is.
    fn messages(&self) -> String {
        let mut text = String::new();
        let general = self.general.iter().map(|note| format!("note: {note}"));
        for line in self.lines.iter().cloned().chain(general) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}", terminal::line(&line));
        }
        text
    }
}

/// Text of the input for a message: short, on one line, and without control characters.
fn quote(text: &str) -> String {
    let short: String = text.chars().take(MAX_QUOTE).collect();
    let rest = if short.len() < text.len() { "…" } else { "" };
    format!("{}{rest}", short.escape_debug())
}
