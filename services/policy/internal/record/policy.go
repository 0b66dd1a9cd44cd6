// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/store"
)

// header is a policy without its manifest. The record of a policy is the length of the header as a varint, the header
// as JSON, and the manifest as received. The manifest is the largest part, and copying it is much cheaper than
// encoding it.
type header struct {
	Key      Key    `json:"key"`
	Source   string `json:"source"`
	Origin   string `json:"origin,omitempty"`
	Manager  string `json:"manager,omitempty"`
	Revision uint64 `json:"revision"`
	Updated  int64  `json:"updated"` // seconds since 1970
}

func encodePolicy(p Policy) []byte {
	h := encode(header{p.Key, p.Source, p.Origin, p.Manager, p.Revision, p.Updated})
	b := make([]byte, 0, binary.MaxVarintLen32+len(h)+len(p.Manifest))
	b = binary.AppendUvarint(b, uint64(len(h)))
	return append(append(b, h...), p.Manifest...)
}

func decodePolicy(b []byte) (Policy, error) {
	size, n := binary.Uvarint(b)
	if n <= 0 || size > uint64(len(b)-n) {
		return Policy{}, errors.New("its header is longer than the record")
	}
	end := n + int(size)
	var h header
	if err := decode(b[n:end], &h); err != nil {
		return Policy{}, err
	}
	return Policy{
		Key: h.Key, Source: h.Source, Origin: h.Origin, Manager: h.Manager, Manifest: bytes.Clone(b[end:]), Revision: h.Revision, Updated: h.Updated,
	}, nil
}

// decode reads the result of encode, and rejects unknown fields.
func decode(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

// migratePolicies migrates the policies of an earlier version; all of them get the change number 0.
func migratePolicies(t *store.Tx, from uint32) error {
	type old struct{ key, record []byte }
	var all []old
	if err := t.ForEach(bucketPolicies, func(k, v []byte) error {
		if from > 1 {
			if _, err := decodePolicy(v); err != nil {
				return fmt.Errorf("%s %.100q: %w", bucketPolicies, k, err)
			}
			all = append(all, old{bytes.Clone(k), bytes.Clone(v)})
			return nil
		}
		var p Policy
		if err := decode(v, &p); err != nil {
			return fmt.Errorf("%s %.100q: %w", bucketPolicies, k, err)
		}
		all = append(all, old{bytes.Clone(k), encodePolicy(p)})
		return nil
	}); err != nil {
		return err
	}
	for _, x := range all {
		t.Delete(bucketPolicies, x.key)
		t.Put(bucketPolicies, journal.StagedKey(string(x.key), 0), x.record)
	}
	return nil
}
