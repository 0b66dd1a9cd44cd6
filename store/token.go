// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package store joins a machine to sluice-store, and keeps and renews the credentials of its node.
//
// It holds what sluice-identity, the command line and sluice-store share: the form of a join token and of the stored
// credentials, and the client of EnrolService.
package store

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Token is a join token.
type Token struct {
	Addresses []string          // of EnrolService: IP:port
	CA        [sha256.Size]byte // hash of the CA certificate, so that no other server gets the secret
	Secret    string
	Member    bool // the machine becomes a member
}

// tokenPrefix is the beginning of each token, by which people and secret scanners recognise it.
const tokenPrefix = "sluice-join-1-"

type tokenText struct {
	Addresses []string `json:"a"`
	CA        []byte   `json:"c"`
	Secret    string   `json:"s"`
	Member    bool     `json:"m,omitempty"`
}

// String returns the text of the token, which is secret.
func (t Token) String() string {
	b, err := json.Marshal(tokenText{t.Addresses, t.CA[:], t.Secret, t.Member})
	if err != nil {
		panic(err) // strings and bytes can always be encoded as JSON
	}
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(b)
}

// ParseToken reads the text of a token. Its errors do not repeat the text.
func ParseToken(text string) (Token, error) {
	encoded, ok := strings.CutPrefix(strings.TrimSpace(text), tokenPrefix)
	if !ok {
		return Token{}, fmt.Errorf("a join token begins with %s; `sluice store token create` prints one", tokenPrefix)
	}
	b, err := base64.RawURLEncoding.DecodeString(encoded)
	if err != nil {
		return Token{}, errors.New("the join token is incomplete or changed: copy all of it")
	}
	var t tokenText
	if err := json.Unmarshal(b, &t); err != nil || len(t.CA) != sha256.Size || t.Secret == "" || len(t.Addresses) == 0 {
		return Token{}, errors.New("the join token is incomplete or changed: copy all of it")
	}
	for _, a := range t.Addresses {
		if _, err := netip.ParseAddrPort(a); err != nil {
			return Token{}, fmt.Errorf("the join token has the address %q, which is not IP:port", a)
		}
	}
	return Token{t.Addresses, [sha256.Size]byte(t.CA), t.Secret, t.Member}, nil
}

// ServerName is the name in the certificates of members in an epoch. A node that knows an epoch refuses members of an
// earlier one, such as a machine that still runs the data from before a restored snapshot.
func ServerName(epoch uint64) string { return fmt.Sprintf("epoch-%d.store.sluice", epoch) }

// epochOf is the inverse of ServerName.
func epochOf(name string) (epoch uint64, ok bool) {
	n, err := fmt.Sscanf(name, "epoch-%d.store.sluice", &epoch)
	return epoch, n == 1 && err == nil && name == ServerName(epoch)
}
