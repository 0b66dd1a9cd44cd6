// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hello

import (
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/model/dnsname"
)

// ErrRefused is the error for a ClientHello that no rule allows.
var ErrRefused = errors.New("refused")

// Rules allow connections by the server name. The zero value allows none.
type Rules struct {
	// Names are the allowed server names, with the meaning of Cilium's serverNames: exact names, "*.example.com"
	// for one label, "**.example.com" for one or more.
	Names *dnsname.Set
	// RefuseECH refuses an encrypted ClientHello. Otherwise its outer name counts. Clients that send the extension
	// with random content (GREASE) are refused too.
	RefuseECH bool
}

// Check returns an error that wraps ErrRefused if the rules do not allow the connection. A connection without a server
// name is always refused, even by a rule for every name.
func (r *Rules) Check(h *Hello) error {
	switch {
	case h.ServerName == "":
		return fmt.Errorf("%w: no server name", ErrRefused)
	case h.ECH && r.RefuseECH:
		return fmt.Errorf("%w: encrypted ClientHello with server name %s", ErrRefused, h.ServerName)
	case r.Names == nil || !r.Names.Matches(h.ServerName):
		return fmt.Errorf("%w: server name %s", ErrRefused, h.ServerName)
	}
	return nil
}
