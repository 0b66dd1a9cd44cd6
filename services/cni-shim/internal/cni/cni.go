// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cni defines the results and errors of CNI, in all versions that the plugin supports. Its tests compare it
// with libcni. The plugin does not link libcni, which would also link package net and encodes every result three times.
package cni

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
)

// Codes of errors that CNI defines.
const (
	ErrIncompatibleVersion uint = 1
	ErrUnsupportedField    uint = 2
	ErrInvalidEnvironment  uint = 4
	ErrIOFailure           uint = 5
	ErrDecodingFailure     uint = 6
	ErrInvalidConfig       uint = 7
	ErrTryAgainLater       uint = 11
)

// Error is the answer of a verb that failed.
type Error struct {
	Code    uint   `json:"code"`
	Msg     string `json:"msg"`
	Details string `json:"details,omitempty"`
}

// NewError returns an error. The details may be empty.
func NewError(code uint, msg, details string) *Error {
	return &Error{Code: code, Msg: msg, Details: details}
}

func (e *Error) Error() string {
	if e.Details == "" {
		return e.Msg
	}
	return e.Msg + "; " + e.Details
}

// DNS is the resolver configuration of a result.
type DNS struct {
	Domain      string   `json:"domain,omitempty"`
	Nameservers []string `json:"nameservers,omitempty"`
	Options     []string `json:"options,omitempty"`
	Search      []string `json:"search,omitempty"`
}

// IsZero reports whether d is empty.
func (d DNS) IsZero() bool {
	return d.Domain == "" && len(d.Nameservers) == 0 && len(d.Options) == 0 && len(d.Search) == 0
}

// Interface is a device of a result.
type Interface struct {
	MAC        string `json:"mac,omitempty"`
	MTU        int    `json:"mtu,omitempty"` // this field, PCIID and SocketPath exist since 1.0.0
	Name       string `json:"name"`
	PCIID      string `json:"pciID,omitempty"`
	Sandbox    string `json:"sandbox,omitempty"`
	SocketPath string `json:"socketPath,omitempty"`
}

// IP is an address of a result.
type IP struct {
	Address   netip.Prefix `json:"address,omitzero"`
	Gateway   Gateway      `json:"gateway,omitzero"`
	Interface *int         `json:"interface,omitempty"` // index of the device
	Version   string       `json:"version,omitempty"`   // "4" or "6"; removed in 1.0.0
}

// Route is a route of a result.
type Route struct {
	AdvMSS   int          `json:"advmss,omitempty"`
	Dst      netip.Prefix `json:"dst,omitzero"`
	GW       Gateway      `json:"gw,omitzero"`
	MTU      int          `json:"mtu,omitempty"`
	Priority int          `json:"priority,omitempty"`
	Scope    *int         `json:"scope,omitempty"`
	Table    *int         `json:"table,omitempty"`
}

// Gateway is an optional address.
type Gateway struct{ netip.Addr }

// UnmarshalText parses an address; an empty text gives the zero value.
func (g *Gateway) UnmarshalText(text []byte) error {
	if err := g.Addr.UnmarshalText(text); err != nil {
		return err
	}
	if g.Zone() != "" {
		return fmt.Errorf("%q has a zone", text)
	}
	g.Addr = g.Unmap()
	return nil
}

// IsZero reports whether the gateway has no address.
func (g Gateway) IsZero() bool { return !g.IsValid() }

// Result is the answer of ADD, with its keys in alphabetical order.
type Result struct {
	CNIVersion string       `json:"cniVersion,omitempty"`
	DNS        DNS          `json:"dns,omitzero"`
	Interfaces []*Interface `json:"interfaces,omitempty"`
	IPs        []*IP        `json:"ips,omitempty"`
	Routes     []*Route     `json:"routes,omitempty"`
}

var (
	earlier = []string{"0.3.0", "0.3.1", "0.4.0"}
	current = []string{"1.0.0", "1.1.0"}
)

// ParseResult parses a result. If it has no version, it gets the given one.
func ParseResult(b []byte, version string) (*Result, error) {
	r := &Result{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, err
	}
	if r.CNIVersion == "" {
		r.CNIVersion = version
	}
	if !slices.Contains(current, r.CNIVersion) && !slices.Contains(earlier, r.CNIVersion) {
		return nil, fmt.Errorf("cniVersion %.20q is not supported", r.CNIVersion)
	}
	for i, dev := range r.Interfaces {
		if dev == nil {
			return nil, fmt.Errorf("interfaces[%d] is null", i)
		}
		if slices.Contains(earlier, r.CNIVersion) {
			dev.MTU, dev.PCIID, dev.SocketPath = 0, "", ""
		}
	}
	for i, ip := range r.IPs {
		switch {
		case ip == nil:
			return nil, fmt.Errorf("ips[%d] is null", i)
		case ip.Interface != nil && (*ip.Interface < 0 || *ip.Interface >= len(r.Interfaces)):
			return nil, fmt.Errorf("ips[%d]: there is no interface %d", i, *ip.Interface)
		}
		ip.Address = unmap(ip.Address)
	}
	for i, route := range r.Routes {
		if route == nil {
			return nil, fmt.Errorf("routes[%d] is null", i)
		}
		route.Dst = unmap(route.Dst)
	}
	return r, nil
}

// unmap converts an IPv4 address in IPv6 form to IPv4.
func unmap(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p
}

// Print writes the result in the format of a version.
func (r *Result) Print(w io.Writer, version string) error {
	out := *r
	out.CNIVersion = version
	if slices.Contains(earlier, version) {
		out.Interfaces, out.IPs = nil, nil
		for _, dev := range r.Interfaces {
			out.Interfaces = append(out.Interfaces, &Interface{MAC: dev.MAC, Name: dev.Name, Sandbox: dev.Sandbox})
		}
		for _, ip := range r.IPs {
			old := *ip
			old.Version = "6"
			if ip.Address.Addr().Is4() {
				old.Version = "4"
			}
			out.IPs = append(out.IPs, &old)
		}
	} else {
		out.IPs = nil
		for _, ip := range r.IPs {
			now := *ip
			now.Version = ""
			out.IPs = append(out.IPs, &now)
		}
	}
	b, err := json.MarshalIndent(&out, "", "    ")
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

// ParseMAC parses a MAC address: six bytes with ":" or "-" between them, or three groups with "." between them.
// canonical is the same address with ":". ok is false for any other text.
func ParseMAC(text string) (mac [6]byte, canonical string, ok bool) {
	digits := ""
	switch {
	case len(text) == 17 && (text[2] == ':' || text[2] == '-'):
		for i := 0; i < 17; i += 3 {
			if i > 0 && text[i-1] != text[2] {
				return mac, "", false
			}
			digits += text[i : i+2]
		}
	case len(text) == 14 && text[4] == '.' && text[9] == '.':
		digits = text[:4] + text[5:9] + text[10:]
	}
	if n, err := hex.Decode(mac[:], []byte(digits)); err != nil || n != len(mac) {
		return mac, "", false
	}
	var groups []string
	for _, b := range mac {
		groups = append(groups, hex.EncodeToString([]byte{b}))
	}
	return mac, strings.Join(groups, ":"), true
}
