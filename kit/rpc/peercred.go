// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// AuthInfo is the credentials.AuthInfo of a connection, with the kernel's peer credentials.
type AuthInfo struct {
	credentials.CommonAuthInfo
	Cred
}

// AuthType implements credentials.AuthInfo.
func (AuthInfo) AuthType() string { return "peercred" }

// PeerCred returns the caller's credentials from the context of a handler.
func PeerCred(ctx context.Context) (Cred, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Cred{}, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Cred, ok
}

// transportCredentials take the peer's identity from the kernel, without a handshake.
type transportCredentials struct{}

func (transportCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	info := AuthInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}
	switch c := c.(type) {
	case interface{ Cred() Cred }:
		info.Cred = c.Cred()
	case syscall.Conn:
		cred, err := peerCred(c)
		if err != nil {
			return nil, nil, err
		}
		info.Cred = cred
	default:
		return nil, nil, fmt.Errorf("connection of type %T has no peer credentials", c)
	}
	return c, info, nil
}

func (transportCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("server credentials used by a client")
}

func (transportCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "peercred"}
}

func (t transportCredentials) Clone() credentials.TransportCredentials { return t }
func (transportCredentials) OverrideServerName(string) error           { return nil }
