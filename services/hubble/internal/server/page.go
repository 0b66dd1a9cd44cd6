// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
)

// pages returns the address of the web page.
type pages struct {
	hubblev1.UnimplementedPageServiceServer
	url func() string
}

// GetPage implements the API.
func (p pages) GetPage(context.Context, *hubblev1.GetPageRequest) (*hubblev1.GetPageResponse, error) {
	if p.url == nil || p.url() == "" {
		return nil, status.Error(codes.FailedPrecondition, "there is no web page: set page.address of sluice-hubble, "+
			"for example to 127.0.0.1:4246, and restart it")
	}
	return &hubblev1.GetPageResponse{Url: p.url()}, nil
}
