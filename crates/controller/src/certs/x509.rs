//! Certificates as bytes: made with rcgen, read with x509-parser, carried in PEM.
//!
//! Nothing read here is trusted to be well formed: whatever cannot be read counts as damaged or missing, and the rule in
//! `plan::certs` says what to do about it.

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::ByteString;
use plan::certs::{Authority, Bundle, Id, Leaf, Origin, Validity};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use x509_parser::{
    certificate::X509Certificate,
    extensions::GeneralName,
    pem::Pem,
    prelude::{FromDer, X509Version},
};

/// Data keys of the Secret.
pub const LEAF: &str = "tls.crt";
pub const LEAF_KEY: &str = "tls.key";
pub const AUTHORITIES: &str = "ca.crt";
pub const AUTHORITY_KEY: &str = "ca.key";

/// By this an authority of ours is known when only a webhook configuration is left to tell of it.
const OUR_NAME: &str = "patchbay webhook authority ";

/// More blocks than this in one PEM text are not looked at.
const MOST_BLOCKS: usize = 256;

/// Why no certificate could be made or served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("make a certificate")]
    Make(#[source] rcgen::Error),
    #[error("the authority's key is not text")]
    Key,
    #[error("read the certificate to serve")]
    Read(#[source] rustls::pki_types::pem::Error),
    #[error("serve the certificate")]
    Serve(#[source] rustls::Error),
}

/// A certificate and its key, in PEM.
pub struct Made {
    pub certificate: String,
    pub key: String,
}

/// What the Secret holds, as far as it can be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub bundle: Bundle,
    pub signer: Option<Id>,
    pub leaf: Option<Leaf>,
}

/// Makes a new authority.
pub fn found(validity: Validity) -> Result<Made, Error> {
    let key = KeyPair::generate().map_err(Error::Make)?;
    let mut params = params(validity);
    // Every authority has a name of its own, so that verifiers never mistake one for another.
    let mark =
        params.key_identifier(&key).iter().take(8).fold(0, |mark: u64, byte| mark << 8 | u64::from(*byte));
    params.distinguished_name = name(format!("{OUR_NAME}{mark:016x}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let certificate = params.self_signed(&key).map_err(Error::Make)?;
    Ok(Made { certificate: certificate.pem(), key: key.serialize_pem() })
}

/// Signs a new serving certificate.
pub fn sign(signer: &Id, key: &[u8], host: String, validity: Validity) -> Result<Made, Error> {
    let key = KeyPair::from_pem(std::str::from_utf8(key).map_err(|_| Error::Key)?).map_err(Error::Make)?;
    let authority = CertificateDer::from(signer.0.as_slice());
    let issuer = Issuer::from_ca_cert_der(&authority, key).map_err(Error::Make)?;
    let mut params = params(validity);
    params.subject_alt_names = CertificateParams::new([host]).map_err(Error::Make)?.subject_alt_names;
    params.distinguished_name = name("patchbay webhook".to_owned());
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate().map_err(Error::Make)?;
    let certificate = params.signed_by(&key, &issuer).map_err(Error::Make)?;
    Ok(Made { certificate: certificate.pem(), key: key.serialize_pem() })
}

fn params(validity: Validity) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.not_before = validity.from.into();
    params.not_after = validity.until.into();
    params
}

fn name(common: String) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

/// The bundle in PEM.
pub fn bundle_pem<'a>(ids: impl IntoIterator<Item = &'a Id>) -> String {
    ids.into_iter().map(|id| pem::encode(&pem::Pem::new("CERTIFICATE", id.0.clone()))).collect()
}

/// Reads a bundle of authorities.
pub fn read_bundle(text: &[u8]) -> Bundle {
    let mut bundle = Bundle::default();
    for block in Pem::iter_from_buffer(text).take(MOST_BLOCKS) {
        match block.ok().and_then(|block| authority(&block.contents)) {
            Some(authority) => bundle.authorities.push(authority),
            None => bundle.damaged = true,
        }
    }
    bundle
}

fn authority(der: &[u8]) -> Option<Authority> {
    let certificate = read(der)?;
    if !certificate.is_ca() {
        return None;
    }
    let mut names = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let origin = if names.any(|name| name.starts_with(OUR_NAME)) { Origin::Ours } else { Origin::Foreign };
    Some(Authority { id: Id(der.to_vec()), validity: validity(&certificate), origin })
}

/// Reads what the Secret holds.
pub fn read_secret(data: &BTreeMap<String, ByteString>) -> Held {
    let part = |key: &str| data.get(key).map_or(&[][..], |bytes| &bytes.0);
    let bundle = read_bundle(part(AUTHORITIES));
    let signer = signer(&bundle, part(AUTHORITY_KEY));
    let leaf = read_leaf(part(LEAF), part(LEAF_KEY), &bundle);
    Held { bundle, signer, leaf }
}

fn signer(bundle: &Bundle, key: &[u8]) -> Option<Id> {
    let key = public_half(key)?;
    let fits = |authority: &&Authority| read(&authority.id.0).is_some_and(|it| it.public_key().raw == key);
    bundle.authorities.iter().find(fits).map(|authority| authority.id.clone())
}

fn read_leaf(text: &[u8], key: &[u8], bundle: &Bundle) -> Option<Leaf> {
    let block = Pem::iter_from_buffer(text).next()?.ok()?;
    let certificate = read(&block.contents)?;
    if certificate.public_key().raw != public_half(key)? {
        return None;
    }
    let signed = |authority: &&Authority| {
        read(&authority.id.0).is_some_and(|it| {
            it.subject() == certificate.issuer()
                && certificate.verify_signature(Some(it.public_key())).is_ok()
        })
    };
    let signed_by = bundle.authorities.iter().find(signed).map(|authority| authority.id.clone());
    let names =
        certificate.subject_alternative_name().ok()??.value.general_names.iter().map(|name| match name {
            GeneralName::DNSName(name) => (*name).to_owned(),
            // Not ours to have made: shown in a form that is no DNS name, so that it fits nothing.
            other => format!("{other:?}"),
        });
    Some(Leaf { signed_by, validity: validity(&certificate), names: names.collect() })
}

fn read(der: &[u8]) -> Option<X509Certificate<'_>> {
    let (rest, certificate) = X509Certificate::from_der(der).ok()?;
    (rest.is_empty() && certificate.version() == X509Version::V3).then_some(certificate)
}

/// The public half of a key in PEM, as it stands in a certificate.
fn public_half(key: &[u8]) -> Option<Vec<u8>> {
    let key = KeyPair::from_pem(std::str::from_utf8(key).ok()?).ok()?;
    Some(key.subject_public_key_info())
}

fn validity(certificate: &X509Certificate<'_>) -> Validity {
    let validity = certificate.validity();
    Validity { from: time(validity.not_before.timestamp()), until: time(validity.not_after.timestamp()) }
}

/// Dates before 1970 do not matter to anybody here.
fn time(seconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// What a TLS listener needs to serve the Secret's certificate.
pub fn server_config(data: &BTreeMap<String, ByteString>) -> Result<Arc<ServerConfig>, Error> {
    let part = |key: &str| data.get(key).map_or(&[][..], |bytes| &bytes.0);
    let chain =
        CertificateDer::pem_slice_iter(part(LEAF)).collect::<Result<Vec<_>, _>>().map_err(Error::Read)?;
    let key = PrivateKeyDer::from_pem_slice(part(LEAF_KEY)).map_err(Error::Read)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(Error::Serve)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(Error::Serve)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
