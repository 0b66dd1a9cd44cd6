// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/sluice-net/sluice/model/workload"
)

// Holder identifies the holder of a number on this node: an endpoint, an endpoint's former number until its move is
// confirmed, or a reference with a name that a caller has chosen. The three kinds have different forms.
type Holder string

const (
	endpointPrefix  = "endpoint:"
	referencePrefix = "reference:"
	formerPrefix    = "former:"
	maxHolder       = 1100 // bytes; more than any that the API accepts: 256 characters of 4 bytes with the prefix
)

// EndpointHolder returns the holder for an attachment of a container.
func EndpointHolder(containerID, interfaceName string) Holder {
	return Holder(endpointPrefix + workload.Owner{ContainerID: containerID, Interface: interfaceName}.String())
}

// ReferenceHolder returns the holder for a name that a caller has chosen.
func ReferenceHolder(reference string) Holder { return Holder(referencePrefix + reference) }

// ParseHolder parses the result of String.
func ParseHolder(s string) (Holder, error) {
	h := Holder(s)
	return h, h.check()
}

// check returns an error if ParseHolder would not accept the holder: such a holder must not be saved, because the next
// process could not start.
func (h Holder) check() error {
	known := strings.HasPrefix(string(h), endpointPrefix) || strings.HasPrefix(string(h), referencePrefix) ||
		strings.HasPrefix(string(h), formerPrefix)
	if !known || len(h) > maxHolder || !utf8.ValidString(string(h)) {
		return fmt.Errorf("%w: %.80q, %d bytes: want %s… or %s…, valid UTF-8, at most %d bytes",
			ErrHolder, string(h), len(h), endpointPrefix, referencePrefix, maxHolder)
	}
	return nil
}

// String returns "endpoint:container/interface" or "reference:text".
func (h Holder) String() string { return string(h) }

// Reference returns the name of a holder that is not an endpoint.
func (h Holder) Reference() (reference string, ok bool) {
	return strings.CutPrefix(string(h), referencePrefix)
}

// former returns the holder that keeps the endpoint's number from before Relabel.
func (h Holder) former() Holder {
	return Holder(formerPrefix + strings.TrimPrefix(string(h), endpointPrefix))
}

// Owner returns the owner of a holder that is an endpoint.
func (h Holder) Owner() (owner workload.Owner, ok bool) {
	text, ok := strings.CutPrefix(string(h), endpointPrefix)
	owner.ContainerID, owner.Interface, _ = strings.Cut(text, "/") // a container id has no "/"
	return owner, ok
}
