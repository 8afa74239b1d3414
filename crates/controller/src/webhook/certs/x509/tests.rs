use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    pki_types::{ServerName, UnixTime},
};

use super::*;

const NAME: &str = "hook.ns.svc";

fn valid() -> Validity {
    Validity::starting_at(SystemTime::now(), Duration::from_hours(1))
}

/// A CA, a leaf that it signed, and the Secret data of both.
struct TestChain {
    ca: PemKeyPair,
    leaf: PemKeyPair,
}

impl TestChain {
    fn new() -> Self {
        Self::of(valid())
    }

    fn of(validity: Validity) -> Self {
        let ca = create_ca(validity).unwrap();
        let id = parse_bundle(ca.certificate.as_bytes()).cas.remove(0).id;
        let leaf = sign_leaf(&id, ca.key.as_bytes(), NAME.to_owned(), validity).unwrap();
        Self { ca, leaf }
    }

    fn id(&self) -> CertId {
        parse_bundle(self.ca.certificate.as_bytes()).cas.remove(0).id
    }

    fn data(&self) -> BTreeMap<String, ByteString> {
        let parts = [
            (CA_CRT, &self.ca.certificate),
            (CA_KEY, &self.ca.key),
            (TLS_CRT, &self.leaf.certificate),
            (TLS_KEY, &self.leaf.key),
        ];
        parts.map(|(key, text)| (key.to_owned(), ByteString(text.clone().into_bytes()))).into()
    }

    fn with(&self, key: &str, bytes: impl AsRef<[u8]>) -> SecretContents {
        let mut data = self.data();
        data.insert(key.to_owned(), ByteString(bytes.as_ref().to_vec()));
        parse_secret(&data)
    }
}

/// Whether an API server that trusts `bundle` accepts `leaf`.
fn verifies(bundle: &str, leaf: &str, name: &str, at: SystemTime) -> bool {
    let mut roots = RootCertStore::empty();
    for ca in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(ca.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
    let leaf = CertificateDer::from_pem_slice(leaf.as_bytes()).unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let at = UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap());
    verifier.verify_server_cert(&leaf, &[], &name, &[], at).is_ok()
}

#[test]
fn a_leaf_verifies_against_its_ca_and_no_other() {
    let (chain, other) = (TestChain::new(), TestChain::new());
    let now = SystemTime::now();
    let (own, leaf) = (&chain.ca.certificate, &chain.leaf.certificate);
    assert!(verifies(own, leaf, NAME, now));
    assert!(verifies(&(other.ca.certificate.clone() + own), leaf, NAME, now));
    assert!(!verifies(&other.ca.certificate, leaf, NAME, now));
    assert!(!verifies(own, leaf, "other.example", now));
}

#[test]
fn a_leaf_verifies_only_within_its_validity() {
    let chain = TestChain::new();
    let accepted = |at| verifies(&chain.ca.certificate, &chain.leaf.certificate, NAME, at);
    let now = SystemTime::now();
    assert!(accepted(now - Duration::from_secs(299)) && accepted(now + Duration::from_secs(3590)));
    assert!(!accepted(now - Duration::from_secs(302)) && !accepted(now + Duration::from_secs(3602)));
}

#[test]
fn created_certificates_are_parsed_back() {
    let chain = TestChain::new();
    let contents = parse_secret(&chain.data());
    let id = chain.id();
    let leaf = contents.leaf.unwrap();
    assert_eq!((contents.signer.as_ref(), leaf.signed_by.as_ref()), (Some(&id), Some(&id)));
    assert_eq!(leaf.dns_names, [NAME.to_owned()].into());
    assert_eq!(contents.bundle.cas.len(), 1);
    assert_eq!(contents.bundle.cas[0].origin, CaOrigin::Ours);
    let seconds = |validity: Validity| {
        [validity.not_before, validity.not_after].map(|at| at.duration_since(UNIX_EPOCH).unwrap().as_secs())
    };
    let age = seconds(leaf.validity)[1] - seconds(leaf.validity)[0];
    assert!((3899..=3901).contains(&age), "{age}");
}

#[test]
fn a_bundle_survives_a_round_trip_in_order() {
    let chains = [TestChain::new(), TestChain::new(), TestChain::new()];
    let text: String = chains.iter().map(|chain| chain.ca.certificate.clone()).collect();
    let bundle = parse_bundle(text.as_bytes());
    let ids: Vec<_> = bundle.cas.iter().map(|ca| ca.id.clone()).collect();
    assert_eq!(ids, chains.each_ref().map(TestChain::id));
    assert_eq!(parse_bundle(bundle_pem(&ids).as_bytes()), bundle);
    assert!(!bundle.corrupt);
}

#[test]
fn after_a_new_ca_the_leaf_is_still_attributed_to_the_old_one() {
    let (old, new) = (TestChain::new(), TestChain::new());
    let mut data = old.data();
    let bundle = new.ca.certificate.clone() + &old.ca.certificate;
    data.insert(CA_CRT.to_owned(), ByteString(bundle.into_bytes()));
    data.insert(CA_KEY.to_owned(), ByteString(new.ca.key.clone().into_bytes()));
    let contents = parse_secret(&data);
    assert_eq!(contents.signer, Some(new.id()));
    assert_eq!(contents.leaf.unwrap().signed_by, Some(old.id()));
}

#[test]
fn corruption_is_reported_and_the_rest_is_parsed() {
    let (chain, other) = (TestChain::new(), TestChain::new());
    let good = &chain.ca.certificate;
    let torn = good.replace("MII", "M!I");
    let cut = &other.ca.certificate[..other.ca.certificate.len() / 2];
    let bundles = [torn.clone() + good, format!("{good}{cut}"), format!("{good}{}", chain.leaf.certificate)];
    for bundle in bundles {
        let contents = chain.with(CA_CRT, &bundle);
        assert!(contents.bundle.corrupt, "{bundle}");
        assert_eq!((contents.bundle.cas.len(), contents.signer), (1, Some(chain.id())), "{bundle}");
    }
    assert_eq!(chain.with(CA_CRT, "junk").signer, None);
    assert_eq!(chain.with(CA_KEY, &other.ca.key).signer, None);
    assert_eq!(chain.with(CA_KEY, [0xff; 40]).signer, None);
    for (key, bytes) in
        [(TLS_CRT, "junk"), (TLS_CRT, ""), (TLS_KEY, "junk"), (TLS_KEY, &other.leaf.key), (TLS_CRT, &torn)]
    {
        assert_eq!(chain.with(key, bytes).leaf, None, "{key}");
    }
    let foreign = BTreeMap::from([(TLS_CRT, &other.leaf.certificate), (TLS_KEY, &other.leaf.key)]);
    let mut data = chain.data();
    data.extend(
        foreign.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.clone().into_bytes()))),
    );
    assert_eq!(parse_secret(&data).leaf.unwrap().signed_by, None);
    assert_eq!(parse_secret(&BTreeMap::new()), SecretContents::default());
}

#[test]
fn a_foreign_ca_is_distinguished_from_ours() {
    let key = KeyPair::generate().unwrap();
    let mut params = params(valid());
    params.distinguished_name = name("other".to_owned());
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let text = params.self_signed(&key).unwrap().pem();
    assert_eq!(parse_bundle(text.as_bytes()).cas[0].origin, CaOrigin::Foreign);
}

#[test]
fn a_valid_secret_can_be_served() {
    let chain = TestChain::new();
    let config = server_config(&chain.data()).unwrap();
    assert_eq!(config.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
    let mut data = chain.data();
    data.insert(TLS_KEY.to_owned(), ByteString(TestChain::new().leaf.key.into_bytes()));
    assert!(server_config(&data).is_err());
    assert!(server_config(&BTreeMap::new()).is_err());
}
