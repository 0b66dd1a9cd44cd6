// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"strings"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// shadowMark begins the part that a shadow adds to the name of a Service. Names of Services do not contain it.
const shadowMark = "@"

// shadowKey returns the key of the shadow of a Service. A shadow replaces a Service that is left out because
// another source or file has a Service of the same name. It has the addresses of the Service that is left out. origin
// is the file or source of that Service.
func shadowKey(k service.ObjectKey, origin string) service.ObjectKey {
	k.Name.Name += shadowMark + strings.ReplaceAll(origin, ":", "_") // a colon separates the port in names of frontends
	return k
}

// isShadow reports whether a name is the name of a shadow.
func isShadow(n service.Name) bool { return strings.Contains(n.Name, shadowMark) }

// shadowed returns the key of the Service for the key of its shadow; it returns any other key unchanged.
func shadowed(k service.ObjectKey) service.ObjectKey {
	k.Name.Name, _, _ = strings.Cut(k.Name.Name, shadowMark)
	return k
}

// newShadow returns the shadow of a Service. The addresses of the shadow refuse connections; otherwise packets to
// them would follow the routes of the node. newShadow returns nil if the Service has no frontends.
func newShadow(s *service.Service, by *managed.By, origin, why string) *object {
	if s == nil || !s.HasFrontends() {
		return nil
	}
	s = s.Clone()
	s.Name = shadowKey(service.ObjectKey{Kind: service.KindService, Name: s.Name}, origin).Name
	s.Closed, s.HealthCheckNodePort = true, 0
	return &object{by: by, remarks: newRemarks([]string{why + ": connections are refused"}, nil), service: s}
}

// shadowsLast orders shadows after other Services.
func shadowsLast(a, b service.Name) int {
	last := func(n service.Name) int {
		if isShadow(n) {
			return 1
		}
		return 0
	}
	return cmp.Compare(last(a), last(b))
}
