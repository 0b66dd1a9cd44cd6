// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pki makes the certificates and kubeconfig files of a test cluster.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Authority signs the certificates of one cluster.
type Authority struct {
	dir         string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// New makes an authority, and writes its certificate to ca.crt in dir.
func New(dir string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "sluice-test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(30 * 24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Authority{dir: dir, certificate: certificate, key: key}, write(dir, "ca.crt", "CERTIFICATE", der)
}

// Issue writes NAME.crt and NAME.key, which are valid for the hosts and identify a client by the subject.
func (a *Authority) Issue(name string, subject pkix.Name, hosts ...string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: subject,
		NotBefore: a.certificate.NotBefore, NotAfter: a.certificate.NotAfter,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return fmt.Errorf("certificate of %s: %w", name, err)
	}
	if err := write(a.dir, name+".crt", "CERTIFICATE", der); err != nil {
		return err
	}
	return writeKey(a.dir, name, key)
}

// Key writes NAME.key, a key without a certificate.
func (a *Authority) Key(name string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	return writeKey(a.dir, name, key)
}

// Kubeconfig writes NAME.kubeconfig with a new certificate for a user in the groups.
func (a *Authority) Kubeconfig(name, server, user string, groups ...string) error {
	if err := a.Issue(name, pkix.Name{CommonName: user, Organization: groups}); err != nil {
		return err
	}
	data := map[string][]byte{}
	for _, file := range []string{"ca.crt", name + ".crt", name + ".key"} {
		content, err := os.ReadFile(filepath.Join(a.dir, file))
		if err != nil {
			return err
		}
		data[file] = content
	}
	type object = map[string]any
	config, err := json.MarshalIndent(object{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": []object{{"name": "test", "cluster": object{
			"server": server, "certificate-authority-data": data["ca.crt"],
		}}},
		"users": []object{{"name": "test", "user": object{
			"client-certificate-data": data[name+".crt"], "client-key-data": data[name+".key"],
		}}},
		"contexts": []object{{"name": "test", "context": object{"cluster": "test", "user": "test"}}},
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(a.dir, name+".kubeconfig"), config, 0o600)
}

func writeKey(dir, name string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return write(dir, name+".key", "EC PRIVATE KEY", der)
}

func write(dir, file, kind string, der []byte) error {
	return os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
