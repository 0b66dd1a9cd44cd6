// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package service applies, lists and explains services: stable addresses with their backends.
package service

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/kit/nearest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Command is `service`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.WithAlias("svc", invocation.Group("service", "Apply and show services and their backends",
		listCommand(inv), getCommand(inv), applyCommand(inv), deleteCommand(inv), diffCommand(inv)))
}

// client shortens the calls of package invocation.
type client = lbv1.LoadBalancerServiceClient

// The kinds of objects.
const (
	kindService = "Service"
	kindSlice   = "EndpointSlice"
)

// defaultNamespace is the namespace of objects without one.
const defaultNamespace = "default"

// isOurs reports whether an object with this API version and kind is a Service or an EndpointSlice, or is probably
// meant as one. The load balancer refuses misspelled kinds.
func isOurs(apiVersion, kind string) bool {
	_, ok := nearest.KindOf(apiVersion, kind, []nearest.Kind{
		{Group: "", Name: kindService, Plural: "services"},
		{Group: "discovery.k8s.io", Name: kindSlice, Plural: "endpointslices"},
	})
	return ok
}

// readManifests reads manifests. With skipOthers it skips objects of other kinds.
func readManifests(inv *invocation.Invocation, files []string, stdin io.Reader, skipOthers bool) ([]manifest.Document,
	error,
) {
	docs, err := manifest.Read(files, stdin)
	if !skipOthers {
		return docs, cmp.Or(err, manifest.Fits(docs))
	}
	kept, others := manifest.Only(docs, isOurs, "a service or an endpoint slice")
	for _, text := range others {
		fmt.Fprintln(inv.ErrOut, "note: "+text)
	}
	if err == nil && len(kept) == 0 {
		err = errors.New("no service or endpoint slice found among the objects")
	}
	return kept, cmp.Or(err, manifest.Fits(kept))
}

// Named parses [NAMESPACE/]NAME.
func Named(text, namespace string) (*lbv1.ServiceKey, error) {
	given, rest, found := strings.Cut(text, "/")
	key := &lbv1.ServiceKey{Namespace: namespace, Name: text}
	if found {
		key.Namespace, key.Name = given, rest
	} else if key.Namespace == "" {
		key.Namespace = defaultNamespace
	}
	if key.Name == "" || key.Namespace == "" || strings.Contains(key.Name, "/") {
		return nil, invocation.Usagef("%q is not NAME or NAMESPACE/NAME", text)
	}
	return key, nil
}

// keyText returns "Service shop/web".
func keyText(k *lbv1.ObjectKey) string {
	name := k.GetName()
	if k.GetNamespace() != "" {
		name = k.GetNamespace() + "/" + name
	}
	return strings.TrimSpace(k.GetKind() + " " + name)
}

// PortText returns "80/TCP".
func PortText(port uint32, protocol netv1.Protocol) string {
	return fmt.Sprintf("%d/%s", port, strings.ToUpper(output.Enum(protocol, "PROTOCOL_")))
}

// AddressText returns "10.244.0.2:80" or "[fd00:244::2]:80".
func AddressText(address string, port uint32) string {
	if a, err := netip.ParseAddr(address); err == nil && port <= 65535 {
		return netip.AddrPortFrom(a, uint16(port)).String()
	}
	return address + ":" + strconv.FormatUint(uint64(port), 10)
}

// FrontendText returns "10.96.0.10:80/TCP", or "node:30080/TCP (IPv4)" for all addresses of the node.
func FrontendText(k *lbv1.FrontendKey) string {
	port := PortText(k.GetPort(), k.GetProtocol())
	if k.GetAddress() != "" {
		_, protocol, _ := strings.Cut(port, "/")
		return AddressText(k.GetAddress(), k.GetPort()) + "/" + protocol
	}
	family := "IPv4"
	if k.GetFamily() == lbv1.IPFamily_IP_FAMILY_IPV6 {
		family = "IPv6"
	}
	return "node:" + port + " (" + family + ")"
}
